"""Drawn programs of the test families."""

from _families import programs

SPLIT = "test"

PROGRAMS = programs("depthwise", "pyramid", "siamese", "decoder", "experts_of_all", "bilinear")
