"""What trained rankers are worth, and how they rank: the files of evaluation and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
import time
from typing import Any

import ml_collections
import numpy as np

from tpugraphs_jax import console, losses, parallel, submission
from tpugraphs_jax.data.selection import LayoutData, TileData
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.run import summary
from tpugraphs_jax.run.job import Job, judged
from tpugraphs_jax.serve import judge
from tpugraphs_jax.serve.ensemble import Ensemble
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import loop


def evaluate(job: Job, workdir: Path, *, split: str = "") -> dict[str, float]:
  """Scores a split and compares the scores with its labels; writes files and tells the means.

  Args:
    job: with a trained ranker.
    workdir: folder for the files.
    split: which one; the validation split unless given.

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
  return _tell_evaluation(job, graphs, ids, scores, workdir, started=started, seconds=seconds,
                          predicts=_predicts(job.config), split=split or "valid")


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
  summary.begin(job.config, workdir, job.data.collection.name)
  summary.update(workdir, model=f"ensemble of {len(ensemble.rankers)}")
  return _tell_evaluation(
      job, graphs, ids, scores, workdir, started=started, split=split or "valid")


def _to_judge(job: Job, split: str) -> tuple[list[OpGraph], list[np.ndarray]]:
  """Labelled graphs of a split, and which of their configurations are judged."""
  graphs = judged(job.data.load(job.config.data_root, split or "valid"))
  if not graphs and split:
    raise ValueError(f"no graph of the split {split} of {job.data.collection.name} has labels: "
                     "evaluate --split=valid, or rank the split with --mode=predict")
  if not graphs:
    console.say(f"{job.data.collection.name}: no labelled graph in the validation split; nothing "
                "to score")
  return graphs, [job.data.validation_ids(graph.name, graph.configs) for graph in graphs]


def _tell_evaluation(
    job: Job, graphs: Sequence[Any], ids: Sequence[np.ndarray], scores: Sequence[np.ndarray],
    workdir: Path, *, started: float, seconds: Sequence[float] = (), predicts: str = "order",
    split: str,
) -> dict[str, float]:
  """Writes and tells what scores of prepared graphs are worth; returns the means."""
  config, collection = job.config, job.data.collection
  rows, means = judge.judge(collection, graphs, ids, scores)
  for row, taken in zip(rows, seconds):
    row["seconds"] = taken
  if parallel.is_primary():
    name = "validation" if split == "valid" else split
    judge.write_csv(workdir / f"{name}.csv", rows)
    if split == "valid":  # the split of the report's page
      judge.write_scores(workdir / judge.SCORES_FILE, graphs, ids, scores)
    if split == "valid" and collection.kind == "tile":
      judge.write_csv(workdir / judge.PROGRAMS_FILE, judge.program_rows(
          graphs, ids, scores, predicts=predicts, target=config.batch.target))
    which, random = _which(config, graphs, ids), judge.random_order(collection, graphs, ids)
    summary.update(workdir, **{name: summary.of_evaluation(
        means, random, which, ids, time.monotonic() - started, split=split)})
    console.say(judge.summary(collection, rows, means, random=random, configurations=which))
  return means


def _predicts(config: ml_collections.ConfigDict) -> str:
  """What scores say of runtimes, see `losses.predicts`; with relative targets their order."""
  if config.batch.target not in ("official", "absolute"):
    return "order"
  return losses.predicts(losses.parse_losses(config.loss.losses))


def _which(
    config: ml_collections.ConfigDict, graphs: Sequence[Any], ids: Sequence[np.ndarray]
) -> str:
  """Which configurations of each graph an evaluation judges, in words."""
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


def predict(
    data: TileData | LayoutData, data_root: str, ranker: Ranker | Ensemble, workdir: Path, *,
    split: str = "test",
) -> None:
  """Ranks a split and writes results.csv (results_valid.csv, ...) in the form of a submission."""
  graphs = data.load(data_root, split)
  scores = ranker.scores(graphs, progress=True)
  if parallel.is_primary():
    name = ranker.collection.name
    path = workdir / ("results.csv" if split == "test" else f"results_{split}.csv")
    submission.write_results(path, name, {
        graph.name: np.argsort(s, kind="stable") for graph, s in zip(graphs, scores)})
    console.say(f"{name}: ranked {len(graphs)} {split} graphs, wrote {path}")
