"""`python -m tpugraphs_jax`: the commands of the package, one to a line."""

import sys

from tpugraphs_jax.infra import console

COMMANDS = {
  "tpugraphs-tile": "train, evaluate and rank tile sizes (also run_tile.py)",
  "tpugraphs-layout": "train, evaluate and rank layouts (also run_layout.py)",
  "python -m tpugraphs_jax.data.download": "fetch the released collections",
  "python -m tpugraphs_jax.data.store": "build the store of the layouts",
  "python -m tpugraphs_jax.synthetic": "write synthetic data in the released form",
  "python -m tpugraphs_jax.collect": "label layout choices of your own programs",
  "python -m tpugraphs_jax.estimate": "tell what your own programs cost on TPUs",
  "python -m tpugraphs_jax.tune_tiles": "order the block sizes of your own kernels by time",
  "python -m tpugraphs_jax.hlo": "show HLO modules as graphs, convert tuning data",
  "python -m tpugraphs_jax.view": "show a program, its layouts and their costs in a browser",
  "python -m tpugraphs_jax.sweep": "many runs: every point of a grid with every seed",
  "python -m tpugraphs_jax.leaderboard": "train every ranker on your data, with a page",
  "python -m tpugraphs_jax.report": "compare finished runs on a page",
  "python -m tpugraphs_jax.run.official": "read weights of the official code",
  "python -m tpugraphs_jax.submission": "join rankings to a submission, check one",
}

if __name__ == "__main__":
  if sys.argv[1:] not in ([], ["--help"], ["-h"]):
    console.fail(f"unexpected argument {sys.argv[1]!r}: without one, this lists the commands")
  print("The commands, each with --help:\n")
  for name, text in COMMANDS.items():
    print(f"  {name:<40} {text}")
