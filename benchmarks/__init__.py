"""Measurements, each with a record of its figures beside it."""
