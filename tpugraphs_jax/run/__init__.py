"""From a config to results, read downward: the work of `run_tile.py` and `run_layout.py`.

  command   the flags of both commands
  configs   config files, the flags that change a field, `--print_config`
  schema    the sections of a config: fields, defaults, refusals
  launch    carries out a command after its flags are parsed
  job       data and ranker of a config, and the graphs of a run
  training  a run from its config to its files
  results   banner, `summary.json`, evaluation and prediction

Further modules: `python` (the commands as a function), `dry_run`, `sweep` and `official` (weights
of the TensorFlow baseline). Only this package knows config objects and flags; the modules that it
calls take plain arguments.
"""

from tpugraphs_jax.run.command import layout, tile

__all__ = ["layout", "tile"]
