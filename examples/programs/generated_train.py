"""Drawn programs of the training families."""

from _families import programs, TRAINING

SPLIT = "train"

PROGRAMS = programs(*TRAINING)
