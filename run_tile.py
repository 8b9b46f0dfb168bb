"""Trains, evaluates and ranks the tile collection; see --help and configs/tile.py."""

from pathlib import Path

from tpugraphs_jax.tasks import run

if __name__ == "__main__":
  run.launch(str(Path(__file__).parent / "configs" / "tile.py"))
