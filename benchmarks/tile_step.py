"""Speed and memory of tile rankers at the size of the full data set.

    python benchmarks/tile_step.py --out tile_step.json

Measures the training step, an epoch, scoring and peak memory with the official settings.
A pool of kernels with the sizes of the released collection (on average 40 nodes and 1,900
configurations) is generated and repeated until there are 5,709 training kernels, of which
1,520 are scored: as many as there are validation and test kernels.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
import time

import jax
import numpy as np
import timing
import tqdm

from tpugraphs_jax import graph, synthetic
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log, training
from tpugraphs_jax.train.experiment import Experiment

_STEPS_IN_FLIGHT = 2  # as in the training loop
TRAIN_KERNELS, SCORED_KERNELS = 5_709, 676 + 844


def kernels(count: int, pool_size: int) -> list[graph.OpGraph]:
  """`count` kernels from a pool of distinct ones, each with its own copy of the configurations."""
  specs = synthetic.file_specs("full", 0, "tile:xla", limit=pool_size)[:pool_size]
  pool = [synthetic.make_file(spec)[0] for spec in tqdm.tqdm(specs, unit="kernel")]

  def copy(number: int) -> graph.OpGraph:
    origin = pool[number % pool_size]
    arrays = {
      f.name: getattr(origin.configs, f.name).copy() for f in dataclasses.fields(origin.configs)
    }
    return dataclasses.replace(
      origin, name=f"{origin.name}_{number}", configs=graph.TileConfigs(**arrays)
    )

  return [copy(number) for number in range(count)]


def measure_training(experiment: Experiment, graphs: list[graph.OpGraph]) -> dict[str, float]:
  """Figures of the second of two epochs from data in memory; the first one compiles."""
  experiment.fit(graphs)
  phase, plan = training.first_stage(experiment, experiment.prepare(graphs), Path())
  batches, train_step = phase.batches, phase.train_step
  steps = plan.steps_per_epoch
  state = parallel.replicate(phase.state)
  epochs, times = [], []
  for _ in range(2):
    started = before = time.perf_counter()
    in_flight = collections.deque()
    for _ in range(steps):
      state, metrics = train_step(state, next(batches))
      in_flight.append(metrics)
      if len(in_flight) > _STEPS_IN_FLIGHT:
        jax.block_until_ready(in_flight.popleft())
      times.append(time.perf_counter() - before)
      before += times[-1]
    jax.block_until_ready(metrics)
    epochs.append(time.perf_counter() - started)
  return {
    "step_ms_mean": 1e3 * epochs[1] / steps,
    "step_ms_median": 1e3 * float(np.median(times[steps:])),
    "second_epoch_s": epochs[1],
  }


def measure_scoring(experiment: Experiment, graphs: list[graph.OpGraph]) -> dict[str, float]:
  """Seconds to score all configurations of the graphs, with compilation."""
  prepared, family = experiment.prepare(graphs), experiment.ranker.family
  stage, _ = training.first_stage(experiment, prepared[: experiment.config.batch.graphs], Path())
  params = stage.state.params
  started = time.perf_counter()
  family.scores(
    params, prepared, [np.arange(len(graph.configs)) for graph in prepared], progress=True
  )
  seconds = time.perf_counter() - started
  configs = sum(len(g.configs) for g in graphs)
  return {"scoring_s": seconds, "scored_kernels": len(graphs), "scored_configs": configs}


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--pool", type=int, default=300, help="number of distinct kernels")
  args = parser.parse_args()
  experiment = Experiment.of(configs.load("tile.py"))
  graphs = kernels(TRAIN_KERNELS, args.pool)
  figures = {"train_kernels": len(graphs), "train_configs": sum(len(g.configs) for g in graphs)}
  figures |= measure_training(experiment, graphs)
  figures |= measure_scoring(experiment, graphs[:SCORED_KERNELS])
  figures["peak_memory_mib"] = log.peak_memory()[1] / 2**20
  timing.report(figures, args.out)


if __name__ == "__main__":
  main()
