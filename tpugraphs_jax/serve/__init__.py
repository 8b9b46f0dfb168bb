"""Trained models: load, score and rank, explain scores, propose configurations, ensembles."""
