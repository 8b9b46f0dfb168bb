"""Trains a ranker for a number of CPU seconds or steps on one core, then judges it.

The systems are the presets, the official settings, the default and the recommended ranker. A run is
a fresh process, whose figures are a JSON file. It first times some steps, so that the schedule of
its learning rate ends with its budget. The budget counts the CPU time of training steps and of
making their batches, but not compilation, preparation and evaluation. Quality is judged on the
validation split, with `data.folds` on the test fold, after the last step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import copy
import datetime
import json
import os
from pathlib import Path
import platform
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import flax
import jax
import numpy as np

from tpugraphs_jax.data.selection import Data
from tpugraphs_jax.infra import files, parallel
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs, variants
from tpugraphs_jax.train import evaluation, log, training
from tpugraphs_jax.train.loading import data_of, evaluable, load_graphs
from tpugraphs_jax.train.session import Training

CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
# The metric that ranks systems, and all metrics of a table.
HEADLINES = {"layout": "kendaltau", "tile": "slowdown1"}
COLUMNS = {
  "layout": ("kendaltau", "opa", "slowdown1", "slowdown10"),
  "tile": ("slowdown1", "slowdown5", "opa", "kendaltau"),
}
_SMALLER_IS_BETTER = ("slowdown1",)
# Systems besides the presets, with their variants of configs/layout.py and configs/tile.py.
OTHERS = {
  "layout": {"recommended": "recommended", "default": "", "official": "official"},
  "tile": {"recommended": "recommended", "official": ""},
}
# Presets that were published for one source of programs alone.
_ONLY = {"second_xla": "xla", "second_nlp": "nlp"}
_PRESET = "preset="
# The time of a step is estimated from steps of so many CPU seconds: an estimate from 30 small steps
# was up to 1.6 times too long.
_TIMED_SECONDS, _MOST_TIMED, _MOST_COMPILED = 20.0, 4000, 60
_STEPS_PER_EPOCH = 500


# Systems.


def kind_of(collection: str) -> str:
  """`tile` or `layout`."""
  return collection.partition(":")[0]


def columns_of(collection: str) -> tuple[str, ...]:
  """The metrics of a table."""
  return COLUMNS[kind_of(collection)]


def systems_of(kind: str) -> dict[str, str]:
  """The config variant of every system of a kind (`layout` or `tile`), by name."""
  names = [name for name in variants.systems(kind) if name.startswith(_PRESET)]
  return {name.removeprefix(_PRESET): name for name in names} | OTHERS[kind]


def racing(collection: str) -> list[str]:
  """The systems that race on a collection, without those made for other programs."""
  kind, source, *_ = collection.split(":")
  return [name for name in systems_of(kind) if _ONLY.get(name, source) == source]


def config_name(collection: str, system: str) -> str:
  """The value of `--config` of a system on a collection, without changes of fields."""
  kind, source, *search = collection.split(":")
  place, name = "" if kind == "tile" else "-".join([source, *search]), system.partition("+")[0]
  variants = ",".join(filter(None, (place, systems_of(kind).get(name, name))))
  return ":".join(filter(None, (f"{kind}.py", variants)))


def config_of(collection: str, system: str, seed: int, data_root: str):
  """The config of a system on a collection."""
  changes, config = system.split("+")[1:], configs.load(config_name(collection, system))
  return config.replace(seed=seed, data_root=data_root, **dict(map(_field, changes)))


def _field(change: str) -> tuple[str, Any]:
  """The field and value of a change such as `loss.margin=0.01`; values are JSON or strings."""
  name, _, text = change.partition("=")
  try:
    value = json.loads(text)
    return name, tuple(value) if isinstance(value, list) else value
  except ValueError:
    return name, text


# Figures.


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
  """Mean of every figure over seeds, of several its standard deviation, and their number."""
  columns = {key: [run[key] for run in runs] for key in runs[0]}
  means = {key: float(np.mean(values)) for key, values in columns.items()} | {"seeds": len(runs)}
  if len(runs) == 1:
    return means
  return means | {"spread": {key: float(np.std(values, ddof=1)) for key, values in columns.items()}}


def figure(row: Mapping[str, Any], column: str, *, empty: str = "") -> str:
  """A cell: the mean of a column and, where it is known, its standard deviation over seeds."""
  if column not in row:
    return empty
  spread = row.get("spread", {})
  return f"{row[column]:.3f}" + (f" ± {spread[column]:.3f}" if column in spread else "")


def summarised(rows: Sequence[Mapping[str, Any]], collection: str) -> dict[str, Any]:
  """Means over seeds of one system, and standard deviations of its metrics."""
  figures = (*columns_of(collection), "parameters", "updates", "step_ms", "rank_cpu_s", "peak_mib")
  return summary([{name: row[name] for name in figures} for row in rows])


def ranked(results: Mapping[str, Mapping[str, Any]], kind: str) -> list[tuple[str, Any]]:
  """Systems with their figures, best first."""
  headline = HEADLINES[kind]
  sign = 1 if headline in _SMALLER_IS_BETTER else -1
  return sorted(results.items(), key=lambda item: sign * item[1][headline])


# One run.


class Compilations:
  """Counts XLA's compilations from its construction on.

  Attributes:
    count: number of compilations.
    seconds: their total time.
  """

  def __init__(self):
    self.count, self.seconds = 0, 0.0
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, duration_secs: float, **unused: str | int) -> None:
    if event.endswith("backend_compile_duration"):
      self.count += 1
      self.seconds += duration_secs


def machine() -> dict[str, Any]:
  """Date, processor, device and versions of a measurement."""
  device = jax.devices()[0]
  return {
    "date": datetime.date.today().isoformat(),
    "processor": _processor(),
    "cores": len(os.sched_getaffinity(0)),
    "device": f"{device.platform}: {device.device_kind}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "flax": flax.__version__,
    "numpy": np.__version__,
  }


def _processor() -> str:
  info = Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.processor()


class Steps:
  """Takes training steps and measures the CPU seconds of those that compiled nothing."""

  def __init__(self, begun: Training):
    self._begun, self._state = begun, parallel.replicate(begun.state)
    self._compilations = Compilations()
    self.taken, self._timed, self._seconds, self.loss = 0, 0, 0.0, 0.0

  @property
  def mean_seconds(self) -> float:
    """CPU seconds of a step that compiled nothing."""
    return self._seconds / max(self._timed, 1)

  @property
  def seconds(self) -> float:
    """CPU seconds of all steps, each counted as the mean of those that compiled nothing."""
    return self.taken * self.mean_seconds

  @property
  def params(self) -> Any:
    return parallel.unreplicate(self._state).eval_params

  def take(self) -> None:
    """Takes a step."""
    compiled, started = self._compilations.count, time.process_time()
    self._state, metrics = self._begun.train_step(self._state, next(self._begun.batches))
    self.loss = float(parallel.unreplicate(metrics)["loss"])
    self.taken += 1
    if self._compilations.count == compiled:
      self._timed += 1
      self._seconds += time.process_time() - started


def judged(ranker: Ranker, data: Data, graphs: Sequence[Any], params: Any) -> dict[str, Any]:
  """Means over graphs, metrics of each graph, and CPU seconds of scoring all of them."""
  family, configs = ranker.family, ranker.config.eval.configs
  ids = [data.validation_ids(graph.name, graph.configs) for graph in graphs]
  family.scores(params, graphs, [some[:configs] for some in ids])  # compiles
  started = time.process_time()
  scores = family.scores(params, graphs, ids)
  seconds = time.process_time() - started
  rows, means = evaluation.evaluate(
    evaluation.with_labels(graphs, ids, scores), data.collection.slowdown_ks
  )
  return means | {"by_graph": {row["graph"]: row for row in rows}, "rank_cpu_s": seconds}


def epochs_of(steps: int, graphs: int) -> tuple[int, int]:
  """Epochs, and slates of an epoch, for about `steps` steps of `graphs` slates each.

  Epochs are short enough to be planned quickly.
  """
  epochs = max(1, steps // _STEPS_PER_EPOCH)
  return epochs, max(1, round(steps / epochs)) * graphs


def phase_of(
  ranker: Ranker, data: Data, graphs: Sequence[Any], folder: Path, *, steps: int
) -> tuple[Steps, int]:
  """The first phase of training, of about `steps` steps, and its number of steps.

  A second phase, of the head alone, is left out of the race.
  """
  epochs, slates = epochs_of(steps, ranker.config.batch.graphs)
  family = copy.copy(ranker.family)
  family.config = ranker.config.replace(train__epochs=epochs, batch__slates_per_epoch=slates)
  phase = family.first_phase(graphs, folder)
  begun = training.begin(phase, training.plan_batches(phase, data.targets))
  return Steps(begun), begun.timetable.total_steps


def seconds_per_step(ranker: Ranker, data: Data, graphs: Sequence[Any]) -> float:
  """Mean CPU seconds of a training step, from some timed steps; 0 if each of them compiled."""
  with tempfile.TemporaryDirectory() as folder:
    steps, _ = phase_of(ranker, data, graphs, Path(folder), steps=_MOST_TIMED)
    while steps.seconds < _TIMED_SECONDS and steps.taken < (
      _MOST_TIMED if steps.mean_seconds else _MOST_COMPILED
    ):
      steps.take()
  return steps.mean_seconds


def measure(config: Any, folder: Path, *, budget: float = np.inf, steps: int = 0) -> dict[str, Any]:
  """Trains a ranker for `budget` CPU seconds or for `steps` steps, and judges it.

  With `data.folds` it is judged on the test fold, otherwise on the validation split.

  Args:
    config: of the ranker.
    folder: for files of its training.
    budget: CPU seconds of training.
    steps: number of steps, whatever they cost; 0 = as many as the budget allows.

  Returns:
    Quality, cost and versions by name, or the error alone if the loss was not finite.
  """
  ranker, collections = Ranker(config), data_of(config)
  compilations, data = Compilations(), collections[0]
  graphs, valid = load_graphs(ranker, collections, folder, resume=False)
  timed = 0.0 if steps else seconds_per_step(ranker, data, graphs)
  steps = steps or max(1, round(budget / max(timed, 1e-6)))
  taking, total = phase_of(ranker, data, graphs, folder, steps=steps)
  while taking.taken < total and taking.seconds < budget:
    taking.take()
    if not np.isfinite(taking.loss):
      return {"error": f"the loss is {taking.loss} after {taking.taken} of {total} steps"}
  peak_mib = log.peak_memory()[1] / 2**20
  if config.data.folds:
    test = evaluable(data.load("test"))
    valid = [ranker.prepare(graph) for graph in test]
  return judged(ranker, data, valid, taking.params) | {
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(taking.params)),
    "steps": taking.taken,
    "planned_steps": total,
    "updates": taking.taken // config.optimizer.accumulation_steps,
    "step_ms": 1e3 * (taking.mean_seconds or timed),  # all steps may have compiled
    "train_cpu_s": taking.seconds,
    "compile_s": compilations.seconds,
    "peak_mib": peak_mib,
    "machine": machine(),
    "versions": log.versions(),
  }


# All runs.


def row_path(args: argparse.Namespace, collection: str, system: str, seed: int) -> Path:
  """The file of a run."""
  length = f"{args.steps}steps" if args.steps else f"{args.minutes:g}min"
  name = name_of(f"{collection}-{system}-{length}-{seed}")
  return args.workdir / "runs" / f"{name}.json"


def name_of(text: str) -> str:
  """A text as a file name: other characters than letters, digits and `.=+-` become `_`."""
  return re.sub(r"[^\w.=+-]+", "_", text)


def run_missing(args: argparse.Namespace, collection: str, system: str, seed: int) -> None:
  """Makes a run in a fresh process unless it is recorded; reports a run that fails."""
  path = row_path(args, collection, system, seed)
  if path.exists():
    return
  print(f"{collection}  {system}  seed {seed}", flush=True)
  names = ("minutes", "steps", "data_root", "workdir", "core")
  values = {"collection": collection, "system": system, "seed": seed}
  values |= {name: getattr(args, name) for name in names}
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder, "figures.json")
    flags = [f"--{name}={value}" for name, value in (values | {"out": out}).items()]
    ended = subprocess.run([sys.executable, "-m", "tpugraphs_jax.leaderboard.race", *flags])
    if ended.returncode:
      print(f"  failed with exit code {ended.returncode}: not counted", flush=True)
      return
    row = json.loads(out.read_text())
  row = {"collection": collection, "system": system, "seed": seed, **row}
  files.write_json(path, row, indent=2)


def run_here(args: argparse.Namespace) -> None:
  """Makes one run in this process, on one core, and writes its figures to `--out`."""
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {args.core})
  config = config_of(args.collection, args.system, args.seed, args.data_root)
  length = {"steps": args.steps} if args.steps else {"budget": 60 * args.minutes}
  parallel.use_compilation_cache(args.workdir / "compilation_cache")
  with tempfile.TemporaryDirectory() as folder:
    try:
      figures = measure(config, Path(folder), **length)
    except ValueError as error:  # such as data on which this system cannot be trained
      figures = {"error": str(error)}
  files.write_json(args.out, figures, indent=2)


def finished(
  args: argparse.Namespace, collection: str
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
  """Figures of the finished runs by system, and a line for each other run."""
  rows: dict[str, list[dict[str, Any]]] = {}
  failures = []
  for system in args.systems or racing(collection):
    for seed in args.seeds:
      path = row_path(args, collection, system, seed)
      row = json.loads(path.read_text()) if path.exists() else {"error": "the run ended early"}
      if "error" in row:
        failures.append(f"{system}, seed {seed}: {row['error']}")
      else:
        rows.setdefault(system, []).append(row)
  return rows, failures


def main() -> None:
  """Makes one run in this process, on one core, and writes its figures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--collection", required=True)
  parser.add_argument("--system", required=True)
  parser.add_argument("--seed", type=int, required=True)
  parser.add_argument("--minutes", type=float, required=True, help="CPU minutes of training")
  parser.add_argument("--steps", type=int, required=True, help="in place of minutes unless 0")
  parser.add_argument("--data_root", required=True)
  parser.add_argument("--workdir", type=Path, required=True, help="has the compilation cache")
  parser.add_argument("--core", type=int, required=True, help="core to run on")
  parser.add_argument("--out", type=Path, required=True, help="file of figures")
  run_here(parser.parse_args())


if __name__ == "__main__":
  main()
