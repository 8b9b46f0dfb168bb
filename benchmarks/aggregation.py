"""Time of sums over neighbours, by formulation: the measurement behind `data.batching.SLOTS`.

    python benchmarks/aggregation.py --out aggregation.json

Compares `neighbour_sum` with tables of several widths (0 is a sorted segment sum), forward alone
and with the gradient. Sizes are `[nodes, configurations * features]` of the layers of the layout
models.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np
import timing
import workloads

from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import machine
from tpugraphs_jax.nn import aggregation

_SIZES = ((48_000, 32), (6_000, 16 * 32), (20_000, 16 * 32), (5_000, 64 * 128))
_SLOTS = (0, 2, 3, 4, 6, 8)


def operand_sum(edges: np.ndarray, nodes: int, slots: int) -> Callable[[jax.Array], jax.Array]:
  """A function `[nodes, F] -> [nodes, F]` that sums every node's operands."""
  tables = batching.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)
  return lambda x: aggregation.neighbour_sum(x, tables, aggregation.OPERANDS)


def with_gradient(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
  """A function that applies a sum, then the transpose of the sum to the result."""

  def both(x):
    total, transpose = jax.vjp(function, x)
    return transpose(total)

  return both


def measure(nodes: int, features: int, repeats: int) -> dict[str, dict[str, float]]:
  """Median milliseconds of each formulation, for `forward` and for `gradient` (both passes)."""
  rng = np.random.default_rng(0)
  edges = workloads.edges(rng, nodes)
  x = jnp.asarray(rng.normal(size=(nodes, features)), jnp.float32)
  result = {}
  for kind, change in (("forward", lambda function: function), ("gradient", with_gradient)):
    runs = {
      f"slots {slots}": jax.jit(change(operand_sum(edges, nodes, slots))).lower(x).compile()
      for slots in _SLOTS
    }
    seconds = timing.medians(
      {name: functools.partial(run, x) for name, run in runs.items()}, repeats=repeats
    )
    result[kind] = {name: 1e3 * value for name, value in seconds.items()}
  return result


def main() -> None:
  args = timing.parser(__doc__, repeats=7).parse_args()
  figures = {}
  for nodes, features in _SIZES:
    for kind, row in measure(nodes, features, args.repeats).items():
      if not figures:
        print(f"{'milliseconds':28}" + "".join(f"{name:>10}" for name in row))
      label = f"[{nodes}, {features}] {kind}"
      figures[label] = row
      print(f"{label:28}" + "".join(f"{value:10.1f}" for value in row.values()))
  timing.write(figures, args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
