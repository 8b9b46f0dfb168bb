"""Compares ranking 1,000 configurations of a large program with the plain formulation.

    python benchmarks/layout_rank.py --out layout_rank.json

The official layout model on 10,000 nodes, 5 % of them configurable, in chunks of
100 configurations.
"""

import functools

import comparison
import plain
import workloads

from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.layout import res_model


def case() -> comparison.Case:
  model = res_model.ResModel()
  batches = workloads.ranking_batches(
      nodes=10_000, config_nodes=500, configs=1_000, chunk=100, hops=model.hops)
  # A model trained with backpropdropout ranks on the full graph.
  return comparison.Case(model, functools.partial(plain.res_model, dropout="fullgraph"), batches)


if __name__ == "__main__":
  machine.keep_freed()
  comparison.run(__doc__, "layout_rank.py", comparison.Scoring, case, repeats=3)
