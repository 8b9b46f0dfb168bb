"""The command `python -m tpugraphs_jax.estimate`; its code is in the package `tuning`."""

import sys

if __name__ == "__main__":
  from tpugraphs_jax.infra import tasks
  from tpugraphs_jax.tuning import estimate_command

  tasks.exit_at_once(estimate_command.main, sys.argv[1:])
elif __name__ != "__mp_main__":  # of the processes that the command starts
  # Else the module would take the function's place in the package.
  raise ImportError("tpugraphs_jax.estimate is a function: from tpugraphs_jax import estimate")
