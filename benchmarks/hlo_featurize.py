"""Seconds to featurize an HLO module, by its number of instructions.

  python benchmarks/hlo_featurize.py --out hlo_featurize.json

The module is synthetic and made of regions of 1,000 instructions. Each instruction has a
shape, a layout and operands, one in twenty a window, and one in fifty a call. Ids have
64 bits, as in modules that jax writes.
"""

import statistics
import time

import timing

from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import proto


def synthetic_module(nodes: int, *, region: int = 1000) -> bytes:
  """A serialized module of `nodes` instructions."""
  module = proto.HloModuleProto(name="synthetic")
  for number, start in enumerate(range(0, nodes, region)):
    ids = range(number << 32, (number << 32) + min(region, nodes - start))
    computation = module.computations.add(name=f"region_{number}", id=number, root_id=ids[-1])
    for k, each_id in enumerate(ids):
      each = computation.instructions.add(name=f"add.{each_id}", opcode="add", id=each_id)
      each.shape.element_type = 11
      each.shape.dimensions.extend([k % 7 + 1, 8, 128])
      each.shape.layout.minor_to_major.extend([2, 1, 0])
      each.operand_ids.extend(ids[operand] for operand in {k // 2, max(0, k - 1)} - {k})
      if k % 20 == 0:
        for size in (3, 3):
          each.window.dimensions.add(size=size, stride=1, padding_low=1)
      if k % 50 == 0 and number:
        each.called_computation_ids.append(number - 1)
  return module.SerializeToString()


def main() -> None:
  parser = timing.parser(__doc__, repeats=3)
  parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 40_000])
  args = parser.parse_args()
  figures = []
  for nodes in args.nodes:
    data = synthetic_module(nodes)
    seconds = []
    for _ in range(args.repeats):
      start = time.perf_counter()
      graph = hlo.featurize(data)
      seconds.append(time.perf_counter() - start)
    figures.append({"nodes": graph.num_nodes, "edges": graph.num_edges,
                    "bytes": len(data), "seconds": statistics.median(seconds)})
    print("{nodes:>7} nodes {edges:>7} edges {bytes:>9} bytes {seconds:>7.3f} s".format(
        **figures[-1]))
  timing.write({"machine": timing.machine(), "figures": figures}, args.out)


if __name__ == "__main__":
  main()
