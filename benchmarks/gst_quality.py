"""Quality, training time and peak memory of Graph Segment Training, by variant.

    python -m tpugraphs_jax.synthetic --out DIR --scale medium --collections layout:xla:random
    python benchmarks/gst_quality.py --data_root DIR/npz --out gst_quality.json

Every variant trains the GraphSAGE of `configs/layout.py` for the same number of steps on the
same 200 configurations per graph, a third of them the fastest ones. Graphs have 300 to 3,000
nodes, segments at most 256, and a step computes gradients for two segments of each graph.
Seconds are wall-clock seconds of training without compilation and evaluation; for `gst_efd`
they include the refresh of the table and the training of the head. Tau is the mean over
validation graphs after the last step. Every run is a fresh process.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
import tempfile
import time
from typing import Any

import gst
import pages
import timing

from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import evaluation, log, loop, training
from tpugraphs_jax.train.loading import data_of, evaluable, fit, trainable

VARIANTS = ("full", "gst", "gst_e", "gst_ed", "gst_efd", "one")
_SEGMENT_NODES, _FRESH, _CONFIGS = 256, 2, 200


class _Evaluation:
  """An evaluation that counts its own seconds and how many of them are compilation."""

  def __init__(self, evaluate: Any, compilations: timing.Compilations):
    self._evaluate, self._compilations = evaluate, compilations
    self.seconds, self.compile_seconds = 0.0, 0.0

  def __call__(self, *args, **kwargs):
    started, compiled = time.perf_counter(), self._compilations.seconds
    result = self._evaluate(*args, **kwargs)
    self.seconds += time.perf_counter() - started
    self.compile_seconds += self._compilations.seconds - compiled
    return result


def config_of(variant: str, seed: int, epochs: int, data_root: str):
  config = gst.config_of(variant)
  config = config.replace(
    seed=seed,
    data_root=data_root,
    data__max_configs=_CONFIGS,
    batch__graphs=4,
    batch__slates_per_epoch=400,
    train__epochs=epochs,
    train__eval_every_epochs=epochs,
    train__valid_configs=500,
    eval__graphs=4,
  )
  if config.segments is None:
    return config
  return config.replace(segments__max_nodes=_SEGMENT_NODES, segments__fresh=_FRESH)


def measure(config, workdir: Path) -> dict[str, float]:
  """Trains once; returns Kendall tau, OPA, seconds of training and peak MiB."""
  ranker, (data,) = Ranker(config), data_of(config)
  train_graphs = data.load("train")
  train_graphs = trainable(data, train_graphs, min_configs=config.batch.min_configs)
  fit(ranker, [data], train_graphs)
  graphs = [ranker.prepare(graph) for graph in train_graphs]
  valid = [ranker.prepare(graph) for graph in evaluable(data.load("valid"))]
  valid = training.sample_graphs(config, valid)
  compilations = timing.Compilations()
  evaluations, started = [], time.perf_counter()

  def train(family, graphs, folder, epochs=config.train.epochs, **options):
    plan = training.plan_batches(family, graphs, data.targets, epochs=epochs)
    phase = training.begin(family, graphs, plan, folder, epochs=epochs, **options)
    evaluate = training.evaluation_of(family, valid, data.collection.slowdown_ks)
    evaluations.append(_Evaluation(evaluate, compilations))
    return loop.train(*phase, evaluations[-1], folder)

  family = ranker.family
  result = train(family, graphs, workdir)
  if config.segments and config.segments.finetune.epochs:
    finetune, params, folder = config.segments.finetune, result.state.eval_params, workdir / "head"
    head, sums = family.head_phase(params, graphs, folder)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=finetune.learning_rate)
    options = dict(epochs=finetune.epochs, params=params, optimizer=optimizer)
    result = train(head, sums, folder, **options)
  seconds = (
    time.perf_counter()
    - started
    - compilations.seconds
    - sum(evaluation.seconds - evaluation.compile_seconds for evaluation in evaluations)
  )
  ids = training.sample_ids(config, valid, 0)
  scores = family.scores(result.state.eval_params, valid, ids)
  _, means = evaluation.evaluate(
    evaluation.with_labels(valid, ids, scores), ranker.collection.slowdown_ks
  )
  return {
    "kendaltau": means["kendaltau"],
    "opa": means["opa"],
    "seconds": seconds,
    "peak_mib": log.peak_memory()[1] / 2**20,
  }


def table(results: dict[str, dict[str, Any]]) -> str:
  """The figures of every variant, as a Markdown table."""
  return pages.table(
    ["variant", "Kendall tau", "OPA", "training", "peak memory"],
    [
      [
        f"`{variant}`",
        pages.figure(row, "kendaltau"),
        f"{row['opa']:.3f}",
        f"{row['seconds']:,.0f} s",
        f"{row['peak_mib']:,.0f} MiB",
      ]
      for variant, row in results.items()
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True, help="folder with layout/xla/random")
  parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
  parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
  parser.add_argument("--epochs", type=int, default=10, help="of 100 steps")
  parser.add_argument("--here", action="store_true", help="make one run, in this process")
  args = parser.parse_args()
  if args.here:
    config = config_of(args.variants[0], args.seeds[0], args.epochs, args.data_root)
    with tempfile.TemporaryDirectory() as folder:
      timing.write(measure(config, Path(folder)), args.out)
    return
  results = {}
  for variant in args.variants:
    results[variant] = pages.summary(
      [
        timing.in_subprocess(
          "gst_quality.py",
          "--here",
          "--variants",
          variant,
          "--seeds",
          str(seed),
          "--epochs",
          str(args.epochs),
          "--data_root",
          args.data_root,
        )
        for seed in args.seeds
      ]
    )
    print(table(results), flush=True)
  timing.write({"machine": timing.machine(), **results}, args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
