"""Trains, evaluates and ranks the tile collection; see --help and configs/tile.py."""

from pathlib import Path

from tpugraphs_jax import huge_pages

if __name__ == "__main__":
  huge_pages.restart_with_huge_pages()
  from tpugraphs_jax.tasks import run  # imported once, after the restart

  run.launch(str(Path(__file__).parent / "configs" / "tile.py"))
