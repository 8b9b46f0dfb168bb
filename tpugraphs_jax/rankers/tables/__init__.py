"""Score tables: the score of a configuration is a sum over its nodes and pairs of nodes."""
