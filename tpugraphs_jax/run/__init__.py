"""Commands for a terminal and a notebook: the work of `run_tile.py` and `run_layout.py`.

  command   the flags of both commands
  configs   config files, the flags that change a field, `--print_config`
  launch    carries out a command after its flags are parsed
  python    the commands as a function

Further modules: `dry_run` and `official` (weights of the TensorFlow baseline). No other
package reads flags of these commands. `train.training` has the run itself.
"""

from tpugraphs_jax.run.command import layout, tile

__all__ = ["layout", "tile"]
