"""From a config to results: what `run_tile.py` and `run_layout.py` do.

  command   flags -> config, and errors -> one line each
  configs   where a config comes from: a file, a variant, a working folder
  checks    what cannot work is refused by the name of its field
  jobs      train, evaluate, predict
  phases    the runs of the training loop that a job is made of

Only these modules know config objects and flags; what they call takes plain arguments.
"""

from tpugraphs_jax import host_memory


def tile() -> None:
  """The command `tpugraphs-tile`, and `run_tile.py`."""
  host_memory.restart_with(host_memory.HUGE_PAGES)
  _launch("tile.py")


def layout() -> None:
  """The command `tpugraphs-layout`, and `run_layout.py`."""
  host_memory.restart_with(host_memory.HUGE_PAGES, host_memory.KEPT)
  _launch("layout.py")


def _launch(default_config: str) -> None:
  from tpugraphs_jax.run import command  # imports jax once, after the restart

  command.launch(default_config)
