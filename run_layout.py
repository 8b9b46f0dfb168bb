"""Trains, evaluates and ranks a layout collection; see --help and configs/layout.py."""

from pathlib import Path

from tpugraphs_jax import host_memory

if __name__ == "__main__":
  host_memory.restart_with(host_memory.HUGE_PAGES, host_memory.KEPT)
  from tpugraphs_jax.tasks import run  # imported once, after the restart

  run.launch(str(Path(__file__).parent / "configs" / "layout.py"))
