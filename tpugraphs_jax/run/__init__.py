"""From a config to results, read downward: the work of `run_tile.py` and `run_layout.py`.

  command   the flags of both commands
  configs   the config of a file and its names, its flags, and how it is shown
  schema    the sections of a config, their defaults, and which fields are refused
  launch    the work of a command once its flags are read
  job       the data and the ranker that a config names, and the graphs that take part
  training  the whole way of a run; also in Python
  results   banner, `summary.json`, evaluation and prediction

Beside them: `python` (the commands as a function), `dry_run`, `sweep` and `official` (weights of
the TensorFlow baseline). Only these modules know config objects and flags; the modules that they
call take plain arguments.
"""

from tpugraphs_jax.run.command import layout, tile

__all__ = ["layout", "tile"]
