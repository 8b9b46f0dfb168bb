"""Trains, evaluates and ranks the tile collection; see --help and configs/tile.py."""

from pathlib import Path

from tpugraphs_jax import host_memory

if __name__ == "__main__":
  host_memory.restart_with(host_memory.HUGE_PAGES)
  from tpugraphs_jax.tasks import run  # imported once, after the restart

  run.launch(str(Path(__file__).parent / "configs" / "tile.py"))
