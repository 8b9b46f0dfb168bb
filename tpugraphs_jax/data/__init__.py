"""Data: files and stores of graphs, their features, batches of padded arrays."""
