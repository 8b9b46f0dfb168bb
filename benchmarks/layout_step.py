"""Compares a training step of the official layout model with the plain formulation.

    python benchmarks/layout_step.py --out layout_step.json

8 programs of about 6,000 nodes, 250 of them configurable, with 16 configurations each;
gradients flow through blocks of 5,000 nodes.
"""

import comparison
import plain
import workloads

from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.layout import res_model


def case() -> comparison.Case:
  model = res_model.ResModel()
  batch = workloads.layout_batch(
      graphs=8, nodes=6_000, config_nodes=250, configs=16, hops=model.hops, keep_nodes=5_000)
  return comparison.Case(model, plain.res_model, [batch])


if __name__ == "__main__":
  machine.keep_freed()
  comparison.run(__doc__, "layout_step.py", comparison.Training, case, repeats=7)
