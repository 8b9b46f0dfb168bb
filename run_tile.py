"""Trains, evaluates and ranks the tile collection; see --help and configs/tile.py."""

from tpugraphs_jax import run

if __name__ == "__main__":
  run.tile()
