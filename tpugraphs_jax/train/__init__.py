"""Training: step, state, loop, checkpoints, log."""
