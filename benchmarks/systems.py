"""The race: every system of the competition at the same training time on one core.

    python -m tpugraphs_jax.data.synthetic --out DIR --scale medium
    python benchmarks/systems.py --data_root DIR/npz --table systems.md --plot systems.png

A run is a fresh process on one core. It times some steps first, so that the horizon of its
learning rate ends where its budget does. The budget counts the CPU time of training steps
and of making their batches, not compilation, preparation and evaluation. Quality is judged
on the validation split after the last step. Programs of our own are few, and are soon learnt
by heart: of six states of a run, each after twice the steps of the one before, the best on
the validation split is judged, on the test split. Every finished run is a JSON file in the
working folder (`benchmarks/races`): a second call makes the missing runs, and two calls may
share the work by seeds, each on a core of its own (`--core`). A system is a preset, a
variant, or one of them with fields changed: `--systems tables tables+loss.noise=0.01`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import os
from pathlib import Path
import re
import runpy
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tpugraphs_jax import atomic, collections
from tpugraphs_jax.predict import artefact, judge
from tpugraphs_jax.run import configs, jobs, phases
from tpugraphs_jax.train import parallel, report
import quality
import timing

OWN = "layout:own:programs"
COLLECTIONS = ("layout:xla:random", "layout:nlp:default", "tile:xla", OWN)
# What decides, what else is told, and whether the smaller number is the better one.
HEADLINES = {"layout": "kendaltau", "tile": "slowdown1"}
COLUMNS = {"layout": ("kendaltau", "opa", "slowdown1", "slowdown10"),
           "tile": ("slowdown1", "slowdown5", "opa", "kendaltau")}
_SMALLER_IS_BETTER = ("slowdown1",)
_PRESET = "preset="
# Systems besides the presets, by the variants that make them.
OTHERS = {"layout": {"tables": "tables", "sage": "", "official": "official"},
          "tile": {"recommended": "recommended", "official": ""}}
# Published for one source of programs alone.
_ONLY = {"second_xla": "xla", "second_nlp": "nlp"}
_OWN_SEGMENT = 100  # nodes; own programs have a few hundred
_TIMED_STEPS, _TIMED_SECONDS = 30, 15.0  # to plan a run
_STEPS_PER_EPOCH = 500
_STATES = 6  # of which one is chosen where a split is left to judge it on


def kind_of(collection: str) -> str:
  return collection.partition(":")[0]


def systems_of(kind: str) -> dict[str, str]:
  """All systems of a kind by name: the variants of its config that make them."""
  known = runpy.run_path(str(configs.folder() / f"{kind}.py"))["VARIANTS"]
  presets = {name.removeprefix(_PRESET): name for name in known if name.startswith(_PRESET)}
  return presets | OTHERS[kind]


def racing(collection: str) -> list[str]:
  """The systems that race on a collection: all but what was published for other programs."""
  kind, source, *_ = collection.split(":")
  return [name for name in systems_of(kind) if source in (_ONLY.get(name, source), "own")]


def config_of(collection: str, system: str, seed: int, data_root: str):
  """The config of a system on a collection."""
  kind, source, *search = collection.split(":")
  name, *changes = system.split("+")
  variant = systems_of(kind).get(name, name)
  place = {"tile:xla": "", OWN: "own"}.get(collection, "-".join([source, *search]))
  config = configs.load(f"{kind}.py:" + ",".join(filter(None, (place, variant))))
  with config.unlocked():
    config.seed, config.data_root = seed, data_root
    if collection == OWN and "segments" in config:
      config.segments.max_nodes = _OWN_SEGMENT
    config.update_from_flattened_dict(dict(map(_field, changes)))
  return config


def _field(change: str) -> tuple[str, Any]:
  """`loss.noise=0.01` as a field and its value, which is JSON or else a string."""
  name, _, text = change.partition("=")
  try:
    return name, artefact.with_tuples(json.loads(text))
  except ValueError:
    return name, text


class Steps:
  """Training steps one after the other, and the CPU seconds of those that compiled nothing."""

  def __init__(self, phase: phases.Phase):
    self._phase, self._state = phase, parallel.replicate(phase.state)
    self._compilations = timing.Compilations()
    self.taken, self._timed, self._seconds, self.loss = 0, 0, 0.0, 0.0

  @property
  def mean_seconds(self) -> float:
    return self._seconds / max(self._timed, 1)

  @property
  def seconds(self) -> float:
    """Of all steps, those that compiled counted like the others."""
    return self.taken * self.mean_seconds

  @property
  def params(self) -> Any:
    return parallel.unreplicate(self._state).eval_params

  def take(self) -> None:
    compiled, started = self._compilations.count, time.process_time()
    self._state, metrics = self._phase.train_step(self._state, next(self._phase.batches))
    self.loss = float(parallel.unreplicate(metrics)["loss"])
    self.taken += 1
    if self._compilations.count == compiled:
      self._timed += 1
      self._seconds += time.process_time() - started


def planned(config, steps: int):
  """The same config for about so many steps, in epochs of a length that is quickly planned."""
  config = config.copy_and_resolve_references()
  config.train.epochs = max(1, steps // _STEPS_PER_EPOCH)
  config.batch.slates_per_epoch = round(steps / config.train.epochs) * config.batch.graphs
  return config


def phase_of(config, job: jobs.Job, graphs: Sequence[Any], folder: Path) -> phases.Phase:
  """The first phase of training; a second one, of the head alone, takes no part."""
  return phases.first_phase(config, job.ranker, graphs, job.data.targets, folder)


def seconds_per_step(config, job: jobs.Job, graphs: Sequence[Any]) -> float:
  """CPU seconds of a step, from some of them."""
  with tempfile.TemporaryDirectory() as folder:
    steps = Steps(phase_of(planned(config, 2 * _TIMED_STEPS), job, graphs, Path(folder)))
    while steps.taken < 2 * _TIMED_STEPS and not (
        steps.seconds > _TIMED_SECONDS or steps.taken >= _TIMED_STEPS and steps.mean_seconds):
      steps.take()
  return steps.mean_seconds


def measure(config, folder: Path, *, budget: float) -> dict[str, Any]:
  """Trains for `budget` CPU seconds; quality, cost and versions."""
  job, compilations = jobs.Job.of(config), timing.Compilations()
  raw = jobs.trainable(job, job.data.load(config.data_root, "train"))
  job.fit(raw)
  graphs = job.prepare(raw)
  total = max(1, round(budget / max(seconds_per_step(config, job, graphs), 1e-6)))
  phase = phase_of(planned(config, total), job, graphs, folder)
  steps, total = Steps(phase), phase.epochs * phase.plan.steps_per_epoch
  final, choosing = judged_split(job), None
  saved = {max(1, total >> halvings) for halvings in range(_STATES)}
  best: tuple[float, int, Any] = (-np.inf, 0, None)  # quality, steps, parameters
  while steps.taken < total and steps.seconds < budget:
    steps.take()
    if not np.isfinite(steps.loss):
      return {"error": f"the loss is {steps.loss} after {steps.taken} of {total} steps"}
    if final != "valid" and steps.taken in saved:
      choosing = choosing or Examined(job, "valid")
      best = max(best, (choosing.judge(phase.scorer, steps.params)["kendaltau"], steps.taken,
                        jax.device_get(steps.params)), key=lambda state: state[:2])
  peak_mib = report.peak_memory()[1] / 2**20
  chosen = {} if final == "valid" else {"valid_kendaltau": best[0], "chosen_steps": best[1]}
  params = steps.params if final == "valid" else best[2]
  return chosen | Examined(job, final).judge(phase.scorer, params) | {
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(phase.state.params)),
      "steps": steps.taken, "planned_steps": total, "step_ms": 1e3 * steps.mean_seconds,
      "train_cpu_s": steps.seconds, "compile_s": compilations.seconds, "peak_mib": peak_mib,
      "machine": timing.machine(), "versions": report.versions()}


def judged_split(job: jobs.Job) -> str:
  """The split of which figures are told: the released test splits have no labels."""
  return "test" if job.data.collection.name == OWN else "valid"


class Examined:
  """The labelled graphs of a split, and what a ranker is worth on them."""

  def __init__(self, job: jobs.Job, split: str):
    self._ranker = job.ranker
    self._graphs = job.prepare(jobs.judged(job.data.load(job.config.data_root, split)))
    self._ids = [job.data.validation_ids(graph.name, graph.configs) for graph in self._graphs]
    self._chunk = job.config.eval.configs
    self._is_compiled = False

  def judge(self, scorer: Any, params: Any) -> dict[str, float]:
    """Means over graphs, and the CPU seconds that scoring them takes."""
    if not self._is_compiled:
      first = [ids[:self._chunk] for ids in self._ids]
      self._ranker.score(scorer, params, self._graphs, first)
      self._is_compiled = True
    started = time.process_time()
    scores = self._ranker.score(scorer, params, self._graphs, self._ids)
    seconds = time.process_time() - started
    means = judge.judge(self._ranker.collection, self._graphs, self._ids, scores)[1]
    return means | {"rank_cpu_s": seconds}


def limits(collection: str, data_root: str) -> dict[str, dict[str, float]]:
  """What a random order gives, and the runtimes without noise where they are known."""
  if collection != OWN:
    case = quality.CASES[collection]._replace(columns=COLUMNS[kind_of(collection)])
    return quality.bounds(case, collection, data_root)
  job = jobs.Job.of(config_of(collection, "official", 0, data_root))
  graphs = jobs.judged(job.data.load(data_root, judged_split(job)))
  ids = [job.data.validation_ids(graph.name, graph.configs) for graph in graphs]
  return {"random": judge.random_order(collections.Collection(collection), graphs, ids)}


def summarised(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
  """Means over seeds of one system, and the deviation of its quality."""
  figures = (*COLUMNS[kind], "parameters", "steps", "step_ms", "rank_cpu_s", "peak_mib")
  means = {name: float(np.mean([row[name] for row in rows])) for name in figures}
  spread = {name: float(np.std([row[name] for row in rows], ddof=len(rows) > 1))
            for name in COLUMNS[kind]}
  return means | {"spread": spread, "seeds": len(rows)}


def ranked(results: Mapping[str, Mapping[str, Any]], kind: str) -> list[tuple[str, Any]]:
  """Systems with their figures, best first."""
  headline = HEADLINES[kind]
  sign = 1 if headline in _SMALLER_IS_BETTER else -1
  return sorted(results.items(), key=lambda item: sign * item[1][headline])


def table(results: Mapping[str, Any], kind: str, bounds: Mapping[str, Any]) -> str:
  """Systems of a collection in Markdown, best first, between the ceiling and a random order."""
  columns = COLUMNS[kind]
  head = (*columns, "parameters", "steps", "ms / step", "s to rank", "peak MiB", "seeds")
  lines = ["| system | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
  plain = lambda name, row: f"| {name} | " + " | ".join(
      [f"{row[c]:.3f}" if c in row else "" for c in columns] + [""] * 6) + " |"
  lines += [plain("ceiling (no noise)", bounds["ceiling"])] if "ceiling" in bounds else []
  for name, row in ranked(results, kind):
    cells = [f"{row[c]:.3f} ± {row['spread'][c]:.3f}" for c in columns]
    cells += [f"{row['parameters']:,.0f}", f"{row['steps']:,.0f}", f"{row['step_ms']:.1f}",
              f"{row['rank_cpu_s']:.1f}", f"{row['peak_mib']:,.0f}", str(row["seeds"])]
    lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
  return "\n".join([*lines, plain("random order", bounds["random"])])


def plot(results: Mapping[str, Any], path: Path) -> None:
  """Draws the quality of every system over the cost of a step, a panel per collection."""
  from matplotlib import pyplot  # extra `plots`; only this needs it

  figure, panels = pyplot.subplots(
      1, len(results), figsize=(5 * len(results), 4), layout="constrained", squeeze=False)
  for axes, (collection, found) in zip(panels[0], results.items()):
    headline = HEADLINES[kind_of(collection)]
    for name, row in found["systems"].items():
      axes.errorbar(row["step_ms"], row[headline], yerr=row["spread"][headline], fmt="o", color="C0")
      axes.annotate(name, (row["step_ms"], row[headline]), xytext=(5, 4),
                    textcoords="offset points", fontsize="small")
    for name, color in (("ceiling", "C2"), ("random", "C3")):
      if name in found["bounds"]:
        axes.axhline(found["bounds"][name][headline], color=color, linestyle=":", label=name)
    axes.set(xscale="log", xlabel="CPU ms per training step", ylabel=headline, title=collection)
    axes.legend(fontsize="small")
  figure.savefig(path, dpi=120)


def row_path(args: argparse.Namespace, collection: str, system: str, seed: int) -> Path:
  name = name_of(f"{collection}-{system}-{args.minutes:g}min-{seed}")
  return args.workdir / "runs" / f"{name}.json"


def name_of(text: str) -> str:
  """A name for a file."""
  return re.sub(r"[^\w.=+-]+", "_", text)


def kept(path: Path, make: Callable[[], Any]) -> Any:
  """What a file holds; it is made unless it is there."""
  if not path.exists():
    with atomic.replacing(path) as file:
      file.write(json.dumps(make()) + "\n")
  return json.loads(path.read_text())


def root_of(args: argparse.Namespace, collection: str) -> str:
  return args.own_root if collection == OWN else args.data_root


def run_missing(args: argparse.Namespace, collection: str, system: str, seed: int) -> None:
  """Makes a run unless it is there."""
  path = row_path(args, collection, system, seed)
  if path.exists():
    return
  print(f"{collection}  {system}  seed {seed}", flush=True)
  arguments = ["--here", "--collections", collection, "--systems", system, "--seeds", str(seed),
               "--minutes", str(args.minutes), "--data_root", str(args.data_root), "--own_root",
               str(args.own_root), "--workdir", str(args.workdir), "--core", str(args.core)]
  try:
    row = timing.in_subprocess("systems.py", *arguments)
  except subprocess.CalledProcessError as error:
    print(f"  failed with exit code {error.returncode}: not counted", flush=True)
    return
  with atomic.replacing(path) as file:
    file.write(json.dumps({"collection": collection, "system": system, "seed": seed, **row}) + "\n")


def run_here(args: argparse.Namespace) -> None:
  """One run in this process, on one core."""
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {args.core})
  (collection,), (system,), (seed,) = args.collections, args.systems, args.seeds
  config = config_of(collection, system, seed, root_of(args, collection))
  parallel.use_compilation_cache(args.workdir / "compilation_cache")
  with tempfile.TemporaryDirectory() as folder:
    timing.write(measure(config, Path(folder), budget=60 * args.minutes), args.out)


def race(args: argparse.Namespace) -> dict[str, Any]:
  """All runs of a collection after the other; what came of them."""
  results: dict[str, Any] = {}
  for collection in args.collections:
    for system in args.systems or racing(collection):
      for seed in args.seeds:
        if not args.recorded:
          run_missing(args, collection, system, seed)
    results[collection] = found = recorded(args, collection)
    kind = kind_of(collection)
    print(f"\n{collection}\n\n{table(found['systems'], kind, found['bounds'])}\n", flush=True)
  return results


def recorded(args: argparse.Namespace, collection: str) -> dict[str, Any]:
  """The systems of which there are runs, and what bounds them."""
  rows = {}
  for system in args.systems or racing(collection):
    paths = [row_path(args, collection, system, seed) for seed in args.seeds]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    for row in found:
      if "error" in row:
        print(f"{collection}  {system}  seed {row['seed']}: {row['error']}", flush=True)
    good = [row for row in found if "error" not in row]
    if good:
      rows[system] = summarised(good, kind_of(collection)) | {"failed": len(found) - len(good)}
  bounds = kept(args.workdir / f"{name_of(collection)}.json",
                lambda: limits(collection, root_of(args, collection)))
  return {"systems": rows, "bounds": bounds}


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", help="synthetic data, with tile/ and layout/")
  parser.add_argument("--own_root", default=str(ROOT / "data/own/npz"), help=f"of {OWN}")
  parser.add_argument("--workdir", type=Path, default=ROOT / "benchmarks/races",
                      help="keeps the runs")
  parser.add_argument("--collections", nargs="+", choices=COLLECTIONS, default=COLLECTIONS)
  parser.add_argument("--systems", nargs="+", help="names of presets, or variants; default: all")
  parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
  parser.add_argument("--minutes", type=float, default=4.0, help="of CPU time for training")
  parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)) if hasattr(
      os, "sched_getaffinity") else 0, help="to run on")
  parser.add_argument("--table", type=Path, help="also write the tables as Markdown")
  parser.add_argument("--plot", type=Path, help="also draw them (needs matplotlib)")
  parser.add_argument("--recorded", action="store_true", help="train nothing, tell what is there")
  parser.add_argument("--here", action="store_true", help="one run, in this process")
  args = parser.parse_args()
  if args.here:
    run_here(args)
    return
  results = race(args)
  timing.write({"machine": timing.machine(), "minutes": args.minutes, **results}, args.out)
  if args.table:
    args.table.write_text("\n\n".join(
        f"## `{name}`\n\n{table(found['systems'], kind_of(name), found['bounds'])}"
        for name, found in results.items()) + "\n")
  if args.plot:
    plot(results, args.plot)


if __name__ == "__main__":
  main()
