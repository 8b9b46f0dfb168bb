"""Graph Segment Training, for networks of layouts and of published systems."""
