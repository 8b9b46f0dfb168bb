"""Trains, evaluates and ranks a layout collection; see --help and configs/layout.py."""

from tpugraphs_jax import run

if __name__ == "__main__":
  run.layout()
