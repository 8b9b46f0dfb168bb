"""Drawn programs of the validation families, which choose a checkpoint."""

from _families import programs

SPLIT = "valid"

PROGRAMS = programs("dense_blocks", "generator", "factored", "crossing", "mixing", "adjacency")
