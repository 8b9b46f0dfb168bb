"""Prints and writes the results of a run.

    summary.json             begun before training, and filled in part by part
    validation.csv           metrics of each graph (`test.csv` for a labelled test split)
    validation_scores.npz    scores and labels
    validation_programs.csv  metrics of each program, for kernels
    results.csv              the ranking in the form of the competition

`training` writes `model.npz`, `log` writes `config.json`, and `run.launch` writes `report.html`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import functools
import math
from pathlib import Path
import signal
import time
from typing import Any

from absl import logging
import jax
import numpy as np
import optax

from tpugraphs_jax import losses, metrics, submission
from tpugraphs_jax.data import npz
from tpugraphs_jax.data.selection import Data
from tpugraphs_jax.datasets import label_kind
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import console, files, machine, parallel, trust
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ensemble, Ranker
from tpugraphs_jax.train import checkpoint, evaluation, log, loop
from tpugraphs_jax.train.loading import evaluable
from tpugraphs_jax.train.session import Training

SUMMARY_FILE = "summary.json"


# The beginning of a run.

_TASKS = {
  "tile": "learn to rank tile sizes of fused kernels",
  "layout": "learn to rank layouts of whole programs",
  "segments": "learn to rank layouts of whole programs, from segments of them",
}


@parallel.primary_only
def announce(config: Config, data: Data) -> None:
  """Prints the task and the data of a run, before the data is read."""
  collection = data.collection
  npz.files_there(data.root, collection.name, "train")  # copies the files of a bucket first
  rows = {
    "task": f"{_TASKS[config.task]}: collection {collection.name}",
    "data": data.root,
    "labels": label_kind(data.root, collection),
  }
  if config.data.folds:
    text = data.division().text
    rows["folds"] = f"{text}; the test split is fold {config.data.fold}"
  console.say(_rows(rows))


def _rows(texts: Mapping[str, str]) -> str:
  return "\n".join(f"{name:<11}{text}" for name, text in texts.items())


def banner(
  config: Config,
  collections: Sequence[Data],
  training: Training,
  graphs: list,
  valid: list,
  workdir: Path,
) -> str:
  """The graphs, model, devices and steps of a run, a line each.

  Args:
    config: of the run.
    collections: of the graphs.
    training: of the first phase.
    graphs, valid: prepared training and validation graphs.
    workdir: the working folder.
  """
  model, batch = config.model, config.batch
  timetable, sizes = training.timetable, _sizes(graphs)
  if also := [data.collection.name for data in collections[1:]]:
    sizes += f", with {' and '.join(also)}"
  metric, sample = evaluation.mean_name(config.train.best_metric), _sample(config, "all of them")
  parameters, precision = optax.tree.size(training.state.params), model.precision
  dtype = model.options.get("dtype", "float32")
  steps = f"{timetable.total_steps:,} in {timetable.epochs} epochs of {timetable.steps_per_epoch:,}"
  texts = {
    "training": sizes,
    "validation": f"{_sizes(valid)}; judged by {metric} on {sample}",
    "model": f"{model.name}, {parameters:,} parameters, {dtype}, matrix products {precision}",
    "devices": _devices(),
    "steps": f"{steps}, each of {batch.graphs} graphs with {batch.configs} configurations",
    "folder": f"{workdir}, seed {config.seed}",
  }
  return _rows(texts)


def _sizes(graphs: Sequence[Any]) -> str:
  configs, nodes = sum(len(g.configs) for g in graphs), [len(g.opcode) for g in graphs]
  size = f"{min(nodes):,} to {max(nodes):,}" if min(nodes) < max(nodes) else f"{min(nodes):,}"
  plural = "s" * (len(graphs) != 1)
  return f"{len(graphs):,} graph{plural} of {size} nodes, {configs:,} configurations"


def _sample(config: Config, all_configs: str) -> str:
  """The configurations per graph that are judged during training, in words."""
  if config.train.valid_sampling == "slates":
    return f"{config.batch.configs} of each graph, drawn anew each time"
  count = config.train.valid_configs
  return f"a seeded {count} of each graph" if count else all_configs


def _devices() -> str:
  devices = jax.devices()
  text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
  return text + f" in {jax.process_count()} processes" * (jax.process_count() > 1)


# summary.json: the results of a run, and the facts with which they are compared with other runs.


def read_summary(workdir: Path) -> dict[str, Any]:
  """The summary of a working folder; empty where it is missing or damaged."""
  return trust.fields_in(workdir / SUMMARY_FILE)


def final_evaluation(summary: Mapping[str, Any]) -> dict[str, Any]:
  """The section with the figures of a run (`evaluation.final_split`); empty before evaluation."""
  return summary.get(evaluation.final_split(summary), {})


@parallel.primary_only
def update_summary(workdir: Path, **sections: Any) -> None:
  """Replaces sections of the summary; all other sections stay."""
  summary = _plain(read_summary(workdir) | sections)
  files.write_json(workdir / SUMMARY_FILE, summary, indent=2)


def _plain(value: Any) -> Any:
  """`value` with None for numbers that are not finite, because JSON has no such numbers."""
  if isinstance(value, Mapping):
    return {key: _plain(entry) for key, entry in value.items()}
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  return value


@parallel.primary_only
def begin_summary(config: Config, workdir: Path, data: Data) -> None:
  """Replaces the summary by a new one with the fields that are known before training."""
  (workdir / SUMMARY_FILE).unlink(missing_ok=True)
  update_summary(
    workdir,
    collection=data.collection.name,
    model=config.model.name,
    seed=config.seed,
    folds=config.data.folds,
    fold=config.data.fold,
    data_root=data.root,
    labels=label_kind(data.root, data.collection),
    devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    versions=log.versions(),
    date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
  )


@contextlib.contextmanager
def interruptions(workdir: Path) -> Iterator[None]:
  """Records in the summary that a signal, or a loss that is not finite, ended training."""
  started, why = time.monotonic(), ""
  try:
    yield
  except SystemExit as end:
    code = end.code
    name = signal.Signals(code - 128).name if isinstance(code, int) and code > 128 else str(code)
    why = f"asked to stop ({name})"
    raise
  except FloatingPointError as error:
    why = str(error).partition(";")[0]
    raise
  finally:
    if why:
      update_summary(workdir, training={"ended": why, "seconds": time.monotonic() - started})


def training_section(
  config: Config, result: loop.TrainResult, *, graphs: int, seconds: float
) -> dict[str, Any]:
  """The section `training` of the summary; `best` or `last` has the step that became the model.

  Args:
    config: of the run.
    result: of the training loop.
    graphs: validation graphs that were judged during training.
    seconds: wall time with evaluation and compilation.
  """
  memory, peak_bytes = log.peak_memory()
  return {
    "ended": result.stop_reason,
    "step": result.step,
    "seconds": seconds,
    "compile_seconds": result.compile_seconds,
    "peak_memory": {"of": memory, "bytes": peak_bytes},
    config.train.result: {
      "step": result.progress.best_step,
      "metric": f"{metrics.SAMPLE}/{evaluation.mean_name(config.train.best_metric)}",
      "value": result.progress.best_value,
      "split": "valid",
      "graphs": graphs,
      "configurations": _sample(config, "all"),
    },
  }


# Evaluation.


def evaluate(ranker: Ranker, data: Data, workdir: Path, *, split: str = "") -> None:
  """Compares the scores of a trained ranker with labels; writes files and prints means.

  Args:
    ranker: trained.
    data: the collection.
    workdir: folder for the files.
    split: the validation split unless given.

  Raises:
    ValueError: `split` is given and none of its graphs has labels.
  """
  started, config = time.monotonic(), ranker.config
  graphs, ids = _to_judge(data, [ranker], split)
  if not graphs:
    return
  graphs = [ranker.prepare(graph) for graph in graphs]  # frees the raw graphs
  scores = ranker.family.scores(ranker.params, graphs, ids)
  judged = Judged(config, data, split or "valid", graphs, ids, scores)
  _finish(judged, workdir, started, _predicted_ns(judged))


def evaluate_ensemble(
  config: Config, data: Data, ensemble: Ensemble, workdir: Path, *, split: str = ""
) -> None:
  """`evaluate` for an ensemble, in a folder without a run.

  Raises:
    ValueError: as `evaluate`, or the ensemble would replace the results of a run.
  """
  started = time.monotonic()
  if parallel.from_primary((workdir / checkpoint.FOLDER).is_dir()):
    raise ValueError(
      f"{workdir} holds a run, and the ensemble would replace its results: give another --workdir"
    )
  graphs, ids = _to_judge(data, ensemble.rankers, split)
  if not graphs:
    return
  scores = ensemble.scores(graphs, ids)
  begin_summary(config, workdir, data)
  update_summary(workdir, model=f"ensemble of {len(ensemble.rankers)}")
  graphs = [ensemble.rankers[0].prepare(graph) for graph in graphs]  # frees the raw graphs
  _finish(Judged(config, data, split or "valid", graphs, ids, scores), workdir, started)


def check_folds(config: Config, data: Data, ensemble: Ensemble, *, split: str) -> None:
  """Refuses (ValueError) graphs on which a model of another fold may have been trained.

  A collection on which no model was trained has other folds and is not refused. There `evaluate`
  warns of judged graphs that trained a model.
  """
  fold_of = lambda config: (config.data.folds, config.data.fold)
  fold, rankers = fold_of(config), ensemble.rankers
  others = {fold_of(ranker.config) for ranker in rankers} - {fold}
  known = {ranker.collection.name for ranker in rankers}
  known.update(*(getattr(ranker.config.data, "also", ()) for ranker in rankers))
  is_known = data.collection.name in known
  if others and is_known and (fold[0] or split != "test"):
    raise ValueError(
      "a model of one fold was trained on the test graphs of another fold: judge one model at a "
      "time, or all on another collection (data.source, data.search), or rank the released test "
      "split with all (--do=predict, data.folds=0, data.fold=0)"
    )


def _to_judge(
  data: Data, rankers: Sequence[Ranker], split: str
) -> tuple[list[OpGraph], list[np.ndarray]]:
  """Labelled graphs of a split, and the numbers of the judged configurations of each.

  Warns of graphs that trained one of the rankers.
  """
  graphs = evaluable(data.load(split or "valid"))
  name = data.collection.name
  if not graphs and split:
    raise ValueError(
      f"no graph of the split {split} of {name} has labels: "
      "evaluate --split=valid, or rank the split with --do=predict"
    )
  if not graphs:
    console.say(f"{name}: no labelled graph in the validation split; nothing to score")
  _warn_of_training(rankers, graphs)
  return graphs, [data.validation_ids(graph.name, graph.configs) for graph in graphs]


def _warn_of_training(rankers: Sequence[Ranker], graphs: Sequence[OpGraph]) -> None:
  """Warns of judged graphs that a model lists as its training graphs."""
  trained = {name for ranker in rankers for name in ranker.about.get("training_graphs", ())}
  if both := [graph.name for graph in graphs if graph.name in trained]:
    model = "the model" + " or of one in the ensemble" * (len(rankers) > 1)
    logging.warning(
      f"{len(both)} of {len(graphs)} judged graphs are training graphs of {model}, so that the "
      f"figures are better than on new graphs: {console.some(both)}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
  """Scores of the labelled graphs of a split.

  Attributes:
    config: of the run.
    data: the collection.
    split: of the graphs.
    graphs: prepared.
    ids: `[n]` int64 numbers of the judged configurations of each graph.
    scores: `[n]` float32 of each graph.
  """

  config: Config
  data: Data
  split: str
  graphs: Sequence[Any]
  ids: Sequence[np.ndarray]
  scores: Sequence[np.ndarray]

  @property
  def name(self) -> str:
    """The section of the summary, and the first word of files."""
    return "validation" if self.split == "valid" else self.split

  @functools.cached_property
  def graph_scores(self) -> list[evaluation.GraphScores]:
    return evaluation.with_labels(self.graphs, self.ids, self.scores)

  @property
  def configurations(self) -> str:
    """The judged configurations of each graph, in words."""
    if all(len(ids) == len(graph.configs) for ids, graph in zip(self.ids, self.graphs)):
      return "all"
    if self.config.eval.indices_dir:
      return "the published ones of each graph"
    return f"a seeded {self.config.eval.max_configs} of each graph"


@parallel.primary_only
def _finish(
  judged: Judged, workdir: Path, started: float, predicted_ns: Sequence[np.ndarray] | None = None
) -> None:
  """Computes the metrics of an evaluation, writes them and prints the means."""
  collection = judged.data.collection
  rows, means = evaluation.evaluate(judged.graph_scores, collection.slowdown_ks)
  labels = [graph.labels for graph in judged.graph_scores]
  random = evaluation.random_order(labels, collection.slowdown_ks)
  _write_tables(judged, workdir, rows, predicted_ns)
  section = _section(judged, rows, means, random, seconds=time.monotonic() - started)
  update_summary(workdir, **{judged.name: section})
  words = dict(split=judged.split, configurations=judged.configurations)
  console.say(evaluation.summary(collection, rows, means, random=random, **words))


def _write_tables(
  judged: Judged,
  workdir: Path,
  rows: Sequence[Mapping[str, Any]],
  predicted_ns: Sequence[np.ndarray] | None,
) -> None:
  """Writes the metrics of each graph; of the splits of a run the scores and programs too."""
  name = judged.name
  evaluation.write_csv(workdir / f"{name}.csv", rows)
  if name not in ("validation", "test"):
    return
  evaluation.write_scores(workdir / evaluation.SCORES_FILE.format(name), judged.graph_scores)
  if judged.data.collection.kind == "tile":
    times = [graph.configs.runtime_ns[ids] for graph, ids in zip(judged.graphs, judged.ids)]
    programs = evaluation.program_rows(judged.graph_scores, times, predicted_ns)
    evaluation.write_csv(workdir / f"{name}_programs.csv", programs)


def _section(
  judged: Judged,
  rows: Sequence[Mapping[str, Any]],
  means: Mapping[str, float],
  random: Mapping[str, float],
  *,
  seconds: float,
) -> dict[str, Any]:
  """The section of an evaluation in the summary."""
  named = lambda values: {evaluation.mean_name(key): value for key, value in values.items()}
  memory, peak_bytes = log.peak_memory()
  return {
    "split": judged.split,
    "graphs": len(rows),
    "graphs_without_order": evaluation.without_order(rows),
    "configurations": judged.configurations,
    "configurations_judged": sum(map(len, judged.scores)),
    "metrics": named(means),
    "random_order": named(random),
    "seconds": seconds,
    "peak_memory": {"of": memory, "bytes": peak_bytes},
  }


def _predicted_ns(judged: Judged) -> list[np.ndarray] | None:
  """Predicted runtimes `[n]` of kernels; None where scores give only the order.

  The losses decide (`losses.predicts`). With relative targets scores give only the order.
  """
  config, scores = judged.config, judged.scores
  target, meaning = config.batch.target, losses.predicts(config.loss.weighted)
  is_relative = target not in ("official", "absolute")
  if config.kind != "tile" or meaning == "order" or is_relative:
    return None
  if meaning == "log":
    scores = [np.exp(of_graph.astype(float)) for of_graph in scores]
  units = [graph.configs.unit_ns(target)[ids] for graph, ids in zip(judged.graphs, judged.ids)]
  return [of_graph * unit for of_graph, unit in zip(scores, units)]


# Prediction.


def check_ranked(collections: Sequence[Data], *, split: str) -> None:
  """Refuses, before training, a split that could not be ranked afterwards.

  Raises:
    FileNotFoundError: the split has no graphs.
    ValueError: the name of a graph cannot be written to a CSV file.
  """

  def check() -> None:
    for data in collections:
      try:
        files = data.files(split)
      except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} (--do=train,evaluate needs no {split} split)") from None
      if not data.options.skip_bad_files:
        for file in files:
          trust.name(file.stem)

  parallel.on_primary(check)


def predict(data: Data, ranker: Ranker | Ensemble, workdir: Path, *, split: str = "test") -> None:
  """Ranks a split; writes results.csv (results_valid.csv, ...) in the form of a submission.

  Warns of graphs whose five best configurations have equal scores: they stay in file order.
  """
  graphs, name = data.load(split), data.collection.name
  scores = ranker.scores(graphs)
  if not machine.is_primary():
    return
  path = workdir / ("results.csv" if split == "test" else f"results_{split}.csv")
  orders = {graph.name: np.argsort(s, kind="stable") for graph, s in zip(graphs, scores)}
  submission.write_results(path, name, orders)
  if tied := [graph.name for graph, s in zip(graphs, scores) if metrics.is_tied(s)]:
    logging.warning(
      "the five best have equal scores, and stay in file order, in "
      f"{len(tied)} of {len(graphs)} graphs: {console.some(tied)}"
    )
  console.say(f"{name}: ranked {len(graphs)} {split} graphs, wrote {path}")
