"""Learned cost models for XLA: rank compiler configurations of a program graph."""

__version__ = "0.1.0"
