"""Time of sums over neighbours, by formulation: the measurement behind `data.batching.SLOTS`.

    python benchmarks/aggregation.py --out aggregation.json

Compares `neighbour_sum` with tables of several widths (0 is a sorted segment sum), an
unsorted segment sum and a sparse matrix product, forward alone and with the gradient.
Sizes are `[nodes, configurations * features]` of the layers of the layout models.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental import sparse
import jax.numpy as jnp
import numpy as np
import timing
import workloads

from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import machine
from tpugraphs_jax.nn import aggregation

_SIZES = ((48_000, 32), (6_000, 16 * 32), (20_000, 16 * 32), (5_000, 64 * 128))
_SLOTS = (0, 2, 3, 4, 6, 8)


def formulations(edges: np.ndarray, nodes: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
  """Functions `[nodes, F] -> [nodes, F]` that sum every node's operands."""
  shuffled = np.random.default_rng(0).permutation(edges)
  in_order = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
  matrix = sparse.BCOO(
      (jnp.ones(len(edges)), jnp.asarray(in_order)), shape=(nodes, nodes), indices_sorted=True)

  def segment_sum(ends: np.ndarray, is_sorted: bool):
    return lambda x: jax.ops.segment_sum(
        x[ends[:, 1]], ends[:, 0], nodes, indices_are_sorted=is_sorted)

  def table(slots: int):
    tables = batching.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)
    return lambda x: aggregation.neighbour_sum(x, tables, aggregation.OPERANDS)

  return {
      "unsorted": segment_sum(shuffled, False),
      "sorted": segment_sum(in_order, True),
      "BCOO": lambda x: matrix @ x,
      **{f"slots {slots}": table(slots) for slots in _SLOTS}}


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
  runs = {}
  for name, function in formulations(edges, nodes).items():
    for kind, variant in (("forward", function), ("gradient", with_gradient(function))):
      runs[f"{name}/{kind}"] = jax.jit(variant).lower(x).compile()
  expected = runs["unsorted/gradient"](x)
  for name, run in runs.items():
    if name.endswith("gradient"):
      np.testing.assert_allclose(run(x), expected, rtol=1e-4, atol=1e-3)
  seconds = timing.medians(
      {name: lambda run=run: run(x) for name, run in runs.items()}, repeats=repeats)
  names = dict.fromkeys(name.split("/")[0] for name in runs)
  return {
      kind: {name: 1e3 * seconds[f"{name}/{kind}"] for name in names}
      for kind in ("forward", "gradient")}


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
