"""Compares a training step of the layout GraphSAGE ranker with the plain formulation.

    python benchmarks/sage_step.py --out sage_step.json

Width 128 and three rounds of message passing, on one program of 10,000 nodes, 500 of them
configurable, with 64 configurations.
"""

import comparison
import plain
import workloads

from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.layout import sage


def case() -> comparison.Case:
  model = sage.SAGE(hidden_dim=128, num_gnns=3)
  batch = workloads.layout_batch(
      graphs=1, nodes=10_000, config_nodes=500, configs=64, hops=model.hops)
  return comparison.Case(model, plain.layout_sage, [batch])


if __name__ == "__main__":
  machine.keep_freed()
  comparison.run(__doc__, "sage_step.py", comparison.Training, case, repeats=3)
