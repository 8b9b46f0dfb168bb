"""Trained models: load one, score and rank graphs, explain a score, put several together."""
