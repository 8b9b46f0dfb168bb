"""Time of a training step by the number of nodes and of configurations.

    python benchmarks/scaling.py --out scaling.json

The official layout model on one program with 4 % configurable nodes. Each size is twice
the one before.
"""

import comparison
import plain
import timing
import workloads

from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.layout import res_model

_NODES = (5_000, 10_000, 20_000, 40_000)
_CONFIGS = (16, 32, 64, 128)


def training(*, nodes: int, configs: int) -> comparison.Training:
  model = res_model.ResModel()
  batch = workloads.layout_batch(
    graphs=1,
    nodes=nodes,
    config_nodes=nodes // 25,
    configs=configs,
    hops=model.hops,
    keep_nodes=nodes * 4 // 5,
  )
  return comparison.Training(comparison.Case(model, plain.res_model, [batch]), "ours")


def main() -> None:
  # Many repeats: a single call is noisier than the few percent that a factor may be off.
  args = timing.parser(__doc__, repeats=100).parse_args()
  sizes = {f"nodes_{nodes}": dict(nodes=nodes, configs=_CONFIGS[0]) for nodes in _NODES}
  sizes |= {f"configs_{configs}": dict(nodes=_NODES[0], configs=configs) for configs in _CONFIGS}
  seconds = timing.medians(
    {name: training(**size) for name, size in sizes.items()}, repeats=args.repeats
  )
  figures = {f"{name}_s": value for name, value in seconds.items()}
  names = list(sizes)
  for small, large in zip(names, names[1:]):
    if small.split("_")[0] == large.split("_")[0]:
      figures[f"{small}_doubled"] = seconds[large] / seconds[small]
  figures["largest_factor"] = max(v for k, v in figures.items() if k.endswith("_doubled"))
  timing.report(figures, args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
