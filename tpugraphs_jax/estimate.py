"""The command `python -m tpugraphs_jax.estimate`; its code is in the package `tuning`."""

import sys

if __name__ != "__main__":  # else the module would take the function's place in the package
  raise ImportError("tpugraphs_jax.estimate is a function: from tpugraphs_jax import estimate")

from tpugraphs_jax.infra import tasks
from tpugraphs_jax.tuning import estimate

tasks.exit_at_once(estimate.main, sys.argv[1:])
