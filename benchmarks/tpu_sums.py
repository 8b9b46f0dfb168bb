"""The TPU compiler's estimates for sums over neighbours, by formulation.

    pip install ".[tpu]"
    JAX_PLATFORMS=cpu python benchmarks/tpu_sums.py --out benchmarks/tpu_sums.json

Each formulation sums `[6000, 1024]` float32 numbers (16 configurations of 64 features) over
9,414 edges, on one core of a TPU v3. `optimal_ms` and `estimated_cycles` are estimates of the
compiler; nothing here was measured on a TPU. The compiler gives no cycles to gathers and
scatters outside fusions, and less time than their bytes need at the memory bandwidth of a v3
(`bytes_ms`). Formulations with gathers therefore compare with each other, but hardly with
products. The choice is `data.batching.slots_of`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pages
import timing
import workloads

from tpugraphs_jax.data import batching
from tpugraphs_jax.hlo import proto
from tpugraphs_jax.nn import aggregation
from tpugraphs_jax.tuning import tpu, tpu_kernels

NODES, FEATURES = 6000, 1024
_BLOCKS = (128, 256)
_BYTES_PER_SECOND = 450e9  # memory bandwidth of a core of a TPU v3
Sum = tuple[Callable[..., jax.Array], tuple]  # a function of x, and its other arguments


def formulations(edges: np.ndarray, nodes: int) -> dict[str, Sum]:
  """Sums over every node's operands: functions `(x [nodes, F], *arguments) -> [nodes, F]`."""
  ways = {
    f"tables of {slots} slots" if slots else "sorted segment sum": _tables(edges, nodes, slots)
    for slots in (0, 2, 4)
  }
  ways["one gather of 4 slots"] = _one_gather(edges, nodes)
  ways["dense product, bfloat16"] = _dense(edges, nodes)
  for size in _BLOCKS:
    ways[f"products of blocks of {size}, bfloat16"] = _blocks(edges, nodes, size)
  return ways


def _tables(edges: np.ndarray, nodes: int, slots: int) -> Sum:
  tables = batching.adjacency(edges[:, 0], edges[:, 1], nodes, slots=slots)
  return lambda x, tables: aggregation.neighbour_sum(x, tables, aggregation.OPERANDS), (tables,)


def _one_gather(edges: np.ndarray, nodes: int) -> Sum:
  """One gather of all four columns of the table and their sum; overflow as in `neighbour_sum`."""
  table = batching.neighbours(edges[:, 0], edges[:, 1], nodes, slots=4)

  def sum_of(x, table):
    rows = aggregation.take_rows(x, table.index.reshape(-1)).reshape(nodes, 4, -1).sum(axis=1)
    rest = (
      aggregation.take_rows(x, table.overflow_index.reshape(-1))
      .reshape(*table.overflow_index.shape, -1)
      .sum(axis=1)
    )
    return rows.at[table.overflow_receiver].add(rest, mode="drop", indices_are_sorted=True)

  return sum_of, (table,)


def _dense(edges: np.ndarray, nodes: int) -> Sum:
  matrix = np.zeros((nodes, nodes), np.float32)
  np.add.at(matrix, (edges[:, 0], edges[:, 1]), 1)
  return _product, (jnp.asarray(matrix, jnp.bfloat16),)


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
  return jnp.matmul(matrix, x.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _blocks(edges: np.ndarray, nodes: int, size: int) -> Sum:
  """Products with the nonempty blocks of the adjacency matrix, summed by block row."""
  rows = -(-nodes // size)
  at, place = np.unique(edges // size, axis=0, return_inverse=True)
  blocks = np.zeros((len(at), size, size), np.float32)
  np.add.at(blocks, (place.reshape(-1), *(edges % size).T), 1)

  def sum_of(x, blocks, row, column):
    padded = jnp.pad(x, ((0, rows * size - nodes), (0, 0))).reshape(rows, size, -1)
    parts = jnp.einsum(
      "kij,kjf->kif",
      blocks,
      padded[column].astype(jnp.bfloat16),
      preferred_element_type=jnp.float32,
    )
    total = jax.ops.segment_sum(parts, row, rows, indices_are_sorted=True)
    return total.reshape(rows * size, -1)[:nodes]

  return sum_of, (jnp.asarray(blocks, jnp.bfloat16), jnp.asarray(at[:, 0]), jnp.asarray(at[:, 1]))


def measure(way: Sum) -> dict[str, Any]:
  """The compiler's estimates and operation counts of a sum on one core of a TPU v3."""
  function, arguments = way
  shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
    (jax.ShapeDtypeStruct((NODES, FEATURES), jnp.float32), *arguments),
  )
  program = tpu.compile_function(function, shapes, "tpu:v3")
  module = proto.parse_module(program.module, where="TPU program")
  opcodes = collections.Counter(
    node.opcode for computation in module.computations for node in computation.instructions
  )
  return {
    "estimated_cycles": tpu_kernels.estimated_cycles(module).cycles,
    "optimal_ms": 1e3 * program.optimal_seconds,
    "gathers": opcodes["gather"],
    "scatters": opcodes["scatter"],
  }


def bytes_ms(edges: np.ndarray) -> float:
  """Milliseconds to read a row per edge and to write all sums, at a core's memory bandwidth."""
  return 1e3 * 4 * FEATURES * (len(edges) + NODES) / _BYTES_PER_SECOND


def table(results: Mapping[str, Any]) -> str:
  """The recorded figures as a Markdown table."""
  return pages.table(
    ["way to sum", "estimated cycles", "optimal", "gathers", "scatters"],
    [
      [
        name,
        f"{row['estimated_cycles'] / 1e3:,.0f} k",
        f"{row['optimal_ms']:.2f} ms",
        str(row["gathers"]),
        str(row["scatters"]),
      ]
      for name, row in results["ways"].items()
    ],
  )


def main() -> None:
  args = timing.parser(__doc__).parse_args()
  edges = workloads.edges(np.random.default_rng(0), NODES)
  results = {
    "libtpu": tpu.libtpu_version(),
    "edges": len(edges),
    "bytes_ms": bytes_ms(edges),
    "ways": {},
  }
  for name, way in formulations(edges, NODES).items():
    results["ways"][name] = measure(way)
    print(table(results).splitlines()[-1], flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  main()
