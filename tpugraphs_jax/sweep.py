"""`python -m tpugraphs_jax.sweep`: many runs of one config; see `run.sweep`."""

import sys

from tpugraphs_jax.run import sweep

if __name__ == "__main__":
  sys.exit(sweep.main())
