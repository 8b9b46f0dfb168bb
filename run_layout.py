"""Trains, evaluates and ranks a layout collection; see --help and configs/layout.py."""

from pathlib import Path

from tpugraphs_jax.tasks import run

if __name__ == "__main__":
  run.launch(str(Path(__file__).parent / "configs" / "layout.py"))
