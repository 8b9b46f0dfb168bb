"""Families that no model has seen."""

from _families import programs

SPLIT = "test"

PROGRAMS = programs(
    "depthwise", "pyramid", "siamese", "decoder", "experts_of_all", "bilinear")
