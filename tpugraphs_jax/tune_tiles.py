"""The command `python -m tpugraphs_jax.tune_tiles`; its code is in the package `tuning`."""

import sys

if __name__ != "__main__":  # else the module would take the function's place in the package
  raise ImportError("tpugraphs_jax.tune_tiles is a function: from tpugraphs_jax import tune_tiles")

from tpugraphs_jax.tuning import tiles

sys.exit(tiles.main())
