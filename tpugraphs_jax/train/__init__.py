"""Training: a run from its config to its files, the step, the loop, checkpoints, evaluation."""
