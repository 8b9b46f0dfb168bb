"""The files and lines of a run: banner, `summary.json`, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import datetime
import json
import math
from pathlib import Path
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import logging
import jax
import ml_collections
import numpy as np
import optax

from tpugraphs_jax import console, files, losses, parallel, submission
from tpugraphs_jax.collections import Collection, label_kind
from tpugraphs_jax.data.selection import LayoutData, TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.run.job import Job, Prepared, judged
from tpugraphs_jax.serve import judge
from tpugraphs_jax.serve.ensemble import Ensemble
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import log, loop

if TYPE_CHECKING:
  from tpugraphs_jax.run.training import Stage

SUMMARY_FILE = "summary.json"


# The beginning of a run.


def begin(job: Job, stage: Stage, prepared: Prepared, workdir: Path) -> None:
  """Writes what is known before training into the summaries, and shows the banner."""
  for part, folder in job.placed(workdir):
    begin_summary(part.config, folder, part.data.collection.name)
  if parallel.is_primary():
    console.say(banner(job, stage, prepared, workdir))


def banner(job: Job, stage: Stage, prepared: Prepared, workdir: Path) -> str:
  """The run that is about to begin, in a few lines.

  Args:
    job: with data and ranker.
    stage: the first one of the run.
    prepared: graphs of the job.
    workdir: the working folder.
  """
  config, collection, model = job.config, job.data.collection, job.config.model
  batch, steps = config.batch, stage.plan.steps_per_epoch
  also = [f"{len(graphs):,} graphs of {part.data.collection.name}"
          for part, graphs in zip(job.also, prepared.also)]
  rows = {
      "task": f"{config.task}, collection {collection.name}",
      "data": f"{config.data_root}",
      "labels": label_kind(config.data_root, collection),
      "training": "; ".join([_sizes(prepared.train), *also]),
      "validation": f"{_sizes(prepared.valid)}; {_judged_by(config)}",
      "model": f"{model.name}, {optax.tree.size(stage.state.params):,} parameters, "
               f"{model.get('dtype', 'float32')}, matrix products "
               f"{model.get('precision', 'default')}",
      "devices": _devices(),
      "steps": f"{stage.epochs * steps:,} in {stage.epochs} epochs of {steps:,}, each of "
               f"{batch.graphs} graphs with {batch.configs} configurations",
      "folder": f"{workdir}, seed {config.seed}",
  }
  return "\n".join(f"{name:<11}{text}" for name, text in rows.items())


def _sizes(graphs: Sequence[Any]) -> str:
  configs, nodes = sum(len(g.configs) for g in graphs), [len(g.opcode) for g in graphs]
  size = f"{min(nodes):,} to {max(nodes):,}" if min(nodes) < max(nodes) else f"{min(nodes):,}"
  return f"{len(graphs):,} graph{'s' * (len(graphs) != 1)} of {size} nodes, " \
         f"{configs:,} configurations"


def _judged_by(config: ml_collections.ConfigDict) -> str:
  metric = judge.mean_name(config.train.best_metric)
  return f"judged by {metric} on {_sample(config, 'all of them')}"


def _sample(config: ml_collections.ConfigDict, everything: str) -> str:
  """The configurations judged during training, in words."""
  count = config.train.valid_configs
  return f"a seeded {count} of each graph" if count else everything


def _devices() -> str:
  devices = jax.devices()
  text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
  return text + f" in {jax.process_count()} processes" * (jax.process_count() > 1)


# summary.json: the result of a run, and what a reader needs to compare it with others.


def read_summary(workdir: Path) -> dict[str, Any]:
  """The summary of a working folder; empty where there is none that can be read."""
  try:
    found = json.loads((workdir / SUMMARY_FILE).read_text())
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}


def update_summary(workdir: Path, **sections: Any) -> None:
  """Replaces sections of the summary; the others stay. Only the primary process writes."""
  if not parallel.is_primary():
    return
  with files.replacing(workdir / SUMMARY_FILE, encoding="utf-8") as file:
    json.dump(_plain(read_summary(workdir) | sections), file, indent=2)
    file.write("\n")


def _plain(value: Any) -> Any:
  """The same for JSON, which knows no NaN."""
  if isinstance(value, Mapping):
    return {key: _plain(entry) for key, entry in value.items()}
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  return value


def begin_summary(config: ml_collections.ConfigDict, workdir: Path, collection: str) -> None:
  """Writes what is known before training; the summary of an earlier run is dropped."""
  if parallel.is_primary():
    (workdir / SUMMARY_FILE).unlink(missing_ok=True)
  update_summary(
      workdir, collection=collection, model=config.model.name, seed=config.seed,
      data_root=config.data_root,
      labels=label_kind(config.data_root, Collection(collection)),
      devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}", versions=log.versions(),
      date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"))


@contextlib.contextmanager
def interruptions(workdir: Path) -> Iterator[None]:
  """Inside, a signal or a loss that is not finite is noted in the summary as the end."""
  started, why = time.monotonic(), ""
  try:
    yield
  except SystemExit as end:
    is_signal = isinstance(end.code, int) and end.code > 128
    name = signal.Signals(end.code - 128).name if is_signal else str(end.code)
    why = f"asked to stop ({name})"
    raise
  except FloatingPointError as error:
    why = str(error).partition(";")[0]
    raise
  finally:
    if why:
      update_summary(workdir, training={"ended": why, "seconds": time.monotonic() - started})


def of_training(
    config: ml_collections.ConfigDict, result: loop.TrainResult, *, graphs: int, seconds: float
) -> dict[str, Any]:
  """The section `training`.

  Args:
    config: of the run.
    result: how it ended.
    graphs: in the validation split.
    seconds: wall time with evaluation and compilation.
  """
  what, _ = log.peak_memory()
  return {
      "ended": result.why, "step": result.step, "seconds": seconds,
      "compile_seconds": result.compile_seconds,
      "peak_memory": {"of": what, "bytes": result.peak_bytes},
      "best": {
          "step": result.best_step,
          "metric": f"{loop.SAMPLE}/{judge.mean_name(config.train.best_metric)}",
          "value": result.best_value, "split": "valid", "graphs": graphs,
          "configurations": _sample(config, "all")},
  }


# Evaluation.


def evaluate(job: Job, workdir: Path, *, split: str = "") -> dict[str, float]:
  """Compares the scores of a split with its labels; writes files, shows and returns the means.

  Args:
    job: with a trained ranker.
    workdir: folder for the files.
    split: the validation split unless given.

  Raises:
    ValueError: no graph of the split that was asked for has labels.
  """
  ranker, started = job.ranker, time.monotonic()
  graphs, ids = _to_judge(job, split)
  if not graphs:
    return {}
  graphs = job.prepare(graphs)  # the raw ones are not kept
  scores = ranker.scorer(ranker.params, graphs, ids, progress=True)
  seconds = [_scoring_seconds(ranker, graph, chosen)
             for graph, chosen in zip(graphs, ids)] if job.config.eval.get("time") else []
  return _write_evaluation(
      job, Judged(graphs, ids, scores, seconds, _predicts(job.config)), workdir,
      split=split or "valid", started=started)


def evaluate_together(
    job: Job, ensemble: Ensemble, workdir: Path, *, split: str = ""
) -> dict[str, float]:
  """As `evaluate`, with several rankers as one; `job` names the data."""
  started = time.monotonic()
  if parallel.from_primary((workdir / loop.CHECKPOINTS).is_dir()):
    raise ValueError(f"{workdir} holds a run, whose results those of the ensemble would replace: "
                     "give another --workdir")
  graphs, ids = _to_judge(job, split)
  if not graphs:
    return {}
  scores = ensemble.scores(graphs, ids, progress=True)
  graphs = [ensemble.rankers[0].prepare(graph) for graph in graphs]
  begin_summary(job.config, workdir, job.data.collection.name)
  update_summary(workdir, model=f"ensemble of {len(ensemble.rankers)}")
  return _write_evaluation(
      job, Judged(graphs, ids, scores), workdir, split=split or "valid", started=started)


def _to_judge(job: Job, split: str) -> tuple[list[OpGraph], list[np.ndarray]]:
  """Labelled graphs of a split, and the configurations of each that are judged."""
  graphs = judged(job.data.load(job.config.data_root, split or "valid"))
  if not graphs and split:
    raise ValueError(f"no graph of the split {split} of {job.data.collection.name} has labels: "
                     "evaluate --split=valid, or rank the split with --mode=predict")
  if not graphs:
    console.say(f"{job.data.collection.name}: no labelled graph in the validation split; nothing "
                "to score")
  return graphs, [job.data.validation_ids(graph.name, graph.configs) for graph in graphs]


class Judged(NamedTuple):
  """Scores of a split.

  Attributes:
    graphs: prepared, with labels.
    ids: `[n]` int64 for each graph, the configurations that were scored.
    scores: `[n]` float32 for each graph, larger = slower.
    seconds: of scoring each graph; empty where not measured.
    predicts: `runtime`, `log` or `order`, see `losses.predicts`.
  """

  graphs: Sequence[Any]
  ids: Sequence[np.ndarray]
  scores: Sequence[np.ndarray]
  seconds: Sequence[float] = ()
  predicts: str = "order"


def _write_evaluation(
    job: Job, found: Judged, workdir: Path, *, split: str, started: float
) -> dict[str, float]:
  """Judges scores, writes the files and shows the means; returns these."""
  collection, triple = job.data.collection, found[:3]
  rows, means = judge.judge(collection, *triple)
  for row, seconds in zip(rows, found.seconds):
    row["seconds"] = seconds
  if not parallel.is_primary():
    return means
  name = "validation" if split == "valid" else split
  judge.write_csv(workdir / f"{name}.csv", rows)
  if split == "valid":  # the split of the report's page
    judge.write_scores(workdir / judge.SCORES_FILE, *triple)
    if collection.kind == "tile":
      judge.write_csv(workdir / judge.PROGRAMS_FILE, judge.program_rows(
          *triple, predicts=found.predicts, target=job.config.batch.target))
  which, random = _which(job.config, *found[:2]), judge.random_order(collection, *found[:2])
  what, peak_bytes = log.peak_memory()
  update_summary(workdir, **{name: {
      "split": split, "graphs": len(rows), "configurations": which,
      "configurations_judged": sum(map(len, found.ids)),
      "metrics": {judge.mean_name(key): value for key, value in means.items()},
      "random_order": {judge.mean_name(key): value for key, value in random.items()},
      "seconds": time.monotonic() - started,
      "peak_memory": {"of": what, "bytes": peak_bytes}}})
  console.say(judge.summary(
      collection, rows, means, random=random, split=split, configurations=which))
  return means


def _predicts(config: ml_collections.ConfigDict) -> str:
  """The meaning of scores, see `losses.predicts`; with relative targets they tell the order."""
  if config.batch.target not in ("official", "absolute"):
    return "order"
  return losses.predicts(losses.parse_losses(config.loss.losses))


def _which(
    config: ml_collections.ConfigDict, graphs: Sequence[Any], ids: Sequence[np.ndarray]
) -> str:
  """The configurations of each graph that an evaluation judges, in words."""
  if all(len(chosen) == len(graph.configs) for chosen, graph in zip(ids, graphs)):
    return "all"
  if config.eval.get("indices_dir"):
    return "the published ones of each graph"
  return f"a seeded {config.eval.max_configs} of each graph"


def _scoring_seconds(ranker: Ranker, graph: Any, ids: np.ndarray) -> float:
  """Seconds to score these configurations of a graph, without compilation."""
  score = lambda: ranker.scorer(ranker.params, [graph], [ids])
  score()
  started = time.monotonic()
  score()
  return time.monotonic() - started


# Prediction.


def predict(
    data: TileData | LayoutData, data_root: str, ranker: Ranker | Ensemble, workdir: Path, *,
    split: str = "test",
) -> None:
  """Ranks a split and writes results.csv (results_valid.csv, ...) in the form of a submission.

  Warns of graphs whose five best configurations have equal scores: their order is that of the
  file.
  """
  graphs = data.load(data_root, split)
  scores = ranker.scores(graphs, progress=True)
  if not parallel.is_primary():
    return
  name = ranker.collection.name
  path = workdir / ("results.csv" if split == "test" else f"results_{split}.csv")
  submission.write_results(path, name, {
      graph.name: np.argsort(s, kind="stable") for graph, s in zip(graphs, scores)})
  tied = [graph.name for graph, s in zip(graphs, scores) if judge.is_tied(s)]
  if tied:
    logging.warning(
        "%d of %d graphs have equal scores at the top, where the order is that of the file: %s",
        len(tied), len(graphs), ", ".join(tied[:5]) + ", ..." * (len(tied) > 5))
  console.say(f"{name}: ranked {len(graphs)} {split} graphs, wrote {path}")
