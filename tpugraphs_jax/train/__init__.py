"""Training: state and step, loop, checkpoints, log."""
