"""From a config to results, read downward: what `run_tile.py` and `run_layout.py` do.

  command   the two commands: flags to a job, and every mistake in one line
  configs   the config of a file and its variants, its flags, and how it is shown
  checks    refuses impossible values by the name of the field
  job       the data and the ranker that a config names, and the graphs that take part
  training  the stages of training; `training.run` is the whole way in Python
  results   banner, `summary.json`, evaluation and prediction

Beside them: `published` (presets of published systems), `dry_run`, `sweep` and `official`
(weights of the TensorFlow baseline). Only these modules know config objects and flags; the
modules that they call take plain arguments.
"""

from tpugraphs_jax.run.command import layout, tile

__all__ = ["layout", "tile"]
