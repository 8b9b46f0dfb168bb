"""Families by which a checkpoint is chosen."""

from _families import programs

SPLIT = "valid"

PROGRAMS = programs(
    "dense_blocks", "generator", "factored", "crossing", "mixing", "adjacency")
