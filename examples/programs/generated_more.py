"""More drawn programs of the training families, of which fewer choices are labelled."""

from _families import programs, SEEDS, TRAINING

SPLIT = "train"

PROGRAMS = programs(*TRAINING, seeds=range(SEEDS, 2 * SEEDS))
