"""Step time and peak memory of Graph Segment Training, by graph size.

    python -m benchmarks.gst --out gst.json

Each case is one program of 5,000, 20,000 or 43,615 nodes (the size of the largest
released one). 4 % of its nodes are configurable. It has 1,000 configurations, of which a
step sees 16. The model is the GraphSAGE of `configs/layout.py`, with segments of at most
1,000 nodes. The time of a step includes making its batch from the prepared graph. Every
figure is the median over three fresh processes, because compilation alone makes peak
memory differ by 100 MiB.
"""

from __future__ import annotations

from pathlib import Path
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks import pages, timing, workloads
from tpugraphs_jax.infra import machine, parallel
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log, training
from tpugraphs_jax.train.loading import data_of, fit

_VARIANTS = ("full", "gst", "gst_ed")
_NODES = (5_000, 20_000, 43_615)
_CONFIGS, _SLATE = 1_000, 16
_PROCESSES = 3


def config_of(variant: str):
  """The config of a variant of `configs/layout.py`, with one graph per step."""
  config = configs.load(f"layout.py:xla-random,{variant}")
  return config.replace(
    batch__graphs=1, batch__configs=_SLATE, batch__slates_per_epoch=1, train__epochs=1_000
  )


def prepare(variant: str, nodes: int) -> tuple[Ranker, Any]:
  """A ranker and the prepared graph; the raw graph is freed, as in a training run."""
  graph = workloads.program(
    np.random.default_rng(0), nodes=nodes, config_nodes=nodes // 25, configs=_CONFIGS
  )
  ranker = Ranker(config_of(variant))
  fit(ranker, data_of(ranker.config), [graph])
  return ranker, ranker.prepare(graph)


def measure(variant: str, nodes: int, repeats: int) -> dict[str, float]:
  """Median seconds of a step and peak MiB, in this process."""
  ranker, prepared = prepare(variant, nodes)
  (data,) = data_of(ranker.config)
  with tempfile.TemporaryDirectory() as folder:
    phase = ranker.family.first_phase([prepared], Path(folder))
    plan = training.plan_batches(phase, data.targets)
    state, train_step, batches, _ = training.begin(phase, plan)
    state, seconds = parallel.replicate(state), []
    for _ in range(repeats + 1):
      started = time.perf_counter()
      state, _ = train_step(state, next(batches))
      jax.block_until_ready(state)
      seconds.append(time.perf_counter() - started)
  # The first step compiles.
  return {"step_s": float(np.median(seconds[1:])), "peak_mib": log.peak_memory()[1] / 2**20}


def table(figures: dict[str, float]) -> str:
  """Step time and peak memory by graph size and variant, as a Markdown table."""
  cell = lambda case: f"{figures[f'{case}_step_s']:.3g} s, {figures[f'{case}_peak_mib']:,.0f} MiB"
  return pages.table(
    ["nodes", *_VARIANTS],
    [[f"{nodes:,}", *(cell(f"{variant}_{nodes}") for variant in _VARIANTS)] for nodes in _NODES],
  )


def main() -> None:
  parser = timing.parser(__doc__, repeats=7)
  parser.add_argument("--variant", choices=_VARIANTS, help="measure only this, in this process")
  parser.add_argument("--nodes", type=int, default=_NODES[0], help="with --variant")
  args = parser.parse_args()
  if args.variant:
    timing.write(measure(args.variant, args.nodes, args.repeats), args.out)
    return
  figures = {}
  for nodes in _NODES:
    for variant in _VARIANTS:
      runs = [
        timing.in_subprocess(
          "gst", "--variant", variant, "--nodes", str(nodes), "--repeats", str(args.repeats)
        )
        for _ in range(_PROCESSES)
      ]
      figures |= {
        f"{variant}_{nodes}_{name}": statistics.median(run[name] for run in runs)
        for name in runs[0]
      }
  timing.report(figures, args.out)
  print(table(figures))


if __name__ == "__main__":
  machine.keep_freed()
  main()
