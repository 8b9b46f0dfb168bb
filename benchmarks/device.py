"""Checks and times the project on the accelerator at hand, in at most ten minutes.

    python -m benchmarks.device --out device.json
    python -m benchmarks.device --out device.json --parts third   # adds to the record
    JAX_PLATFORMS=cpu python -m benchmarks.device --small

It needs jax for the device and the packages of `device.txt`. Each part runs in a process of its
own and within its seconds. A part that fails or takes longer is named in the record under
`failures`, with the figures that it had found; the others go on. First all parts but `tune` run
together: they check and compile, and time nothing. Then each part with times runs alone, with the
programs of jax's compilation cache.

parity_tile, parity_layout   the official models against the numbers of their code in
                 `tests/data/parity`: the largest difference divided by the largest number
training         two runs with `train.deterministic`, and one that was stopped and resumed
SAGE, ResModel, third, tables, gst_ed   scores, loss and gradient of a batch beside the plain
                 formulation: that of `tests/support/plain.py`, or a graph of its own for every
                 configuration; `gst_ed` on the segment with gradients, and its training step
                 beside a step on the whole program
tune_conv, tune_attention   `tpugraphs_jax.tune`, measured here, for two networks

Programs are random (`workloads.py`). Seconds are medians of interleaved calls, without
compilation. Peaks are of the memory of the device, on a CPU of the process; the peak of a plain
formulation is measured after the project's, and is at least as large. Estimates are XLA's for the
compiled program: temporary memory and, for the GPUs of `gpus.py`, milliseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = Path(__file__).parents[1]
_MODULE = "benchmarks.device"
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpus, gst, optimised, pages, timing, workloads
from tests.support import comparing, plain
from tpugraphs_jax import losses, synthetic
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import ranker
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.rankers.segments.batches import SegmentSlate
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log, training
from tpugraphs_jax.train.loading import data_of, fit

Figures = dict[str, Any]
_SECONDS = 580  # of all parts
_CHECKS_SECONDS = 330  # of the parts that run together
_NO_TIME = "no time was left"
_LOSSES = losses.parse_losses("ListMLELoss:1")
_FLAGS = {  # of XLA, by part
  "parity_tile": "--xla_gpu_autotune_level=0",
  "parity_layout": "--xla_gpu_autotune_level=0",
  "training": "--xla_gpu_deterministic_ops=true",
}
_STEP_FLAGS = "--xla_gpu_collect_cost_model_stats=true"


# Parity with the official code.


def parity(kind: str, small: bool) -> Iterator[Figures]:
  """The largest relative difference from each recorded case, by what is compared."""
  from tests.rankers import test_official_parity

  files, comparisons = {
    "tile": (test_official_parity.TILE_FILES, test_official_parity.tile_comparisons),
    "layout": (test_official_parity.LAYOUT_FILES, test_official_parity.layout_comparisons),
  }[kind]
  for path in files[: 1 if small else None]:
    largest: dict[str, float] = {}
    for what, actual, expected in comparisons(path):
      largest[what] = _larger(largest.get(what, 0.0), difference(actual, expected))
    yield {path.stem: largest}


def difference(actual: Any, expected: Any) -> float:
  """The largest difference, divided by the largest magnitude of its array; NaN where one is NaN.

  The divisor is at least a hundredth of the largest magnitude of all arrays of the tree: a gradient
  that is 0 by its formula consists of rounding errors.
  """
  pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
  largest = [np.abs(b).max(initial=0) for _, b in pairs]
  least = max(0.01 * max(largest), 1e-30)
  return float(
    np.max(
      [
        np.abs(np.asarray(a) - b).max(initial=0) / max(size, least)
        for (a, b), size in zip(pairs, largest)
      ]
    )
  )


def _larger(first: float, second: float) -> float:
  """The larger number, NaN where one is NaN."""
  return float(np.maximum(first, second))


# Runs.


def train(folder: str, data_root: str, *, small: bool, stop_at: int, resume: bool) -> None:
  """A deterministic run of Graph Segment Training on tiny data; SIGTERM ends it at `stop_at`."""
  config = configs.load(f"layout.py:xla-random,gst_ed{',ci' if small else ''}")
  config = config.replace(
    data_root=data_root,
    segments__max_nodes=50,
    train__deterministic=True,
    train__result="last",
    train__epochs=3,
    train__log_every_steps=1,
    train__valid_configs=20,
    batch__slates_per_epoch=64,
  )
  parallel.compile_quickly()  # on CPUs alone
  say_progress = log.Log.say_progress

  def say_and_stop(self, step, *args, **kwargs):
    say_progress(self, step, *args, **kwargs)
    if step == stop_at:
      signal.raise_signal(signal.SIGTERM)

  log.Log.say_progress = say_and_stop
  training.run(config, Path(folder), do=("train",), resume=resume)


def run_training(small: bool) -> Iterator[Figures]:
  """Whether a second run, and one that was stopped and resumed, give the same parameters."""
  with tempfile.TemporaryDirectory() as scratch:
    root = synthetic.generate(
      Path(scratch) / "data", collections=["layout:xla:random"], limit=8, progress=False
    )

    def start(name: str, *more: str) -> subprocess.Popen:
      line = [sys.executable, "-m", _MODULE, "--train", f"{scratch}/{name}", str(root), *more]
      line += ["--small"] * small
      return subprocess.Popen(line, stdout=subprocess.DEVNULL)

    ended = [run.wait() for run in (start("one"), start("two"), start("three", "--stop_at", "6"))]
    ended.append(start("three", "--resume").wait())
    load = lambda name: ranker.load(f"{scratch}/{name}").params
    first, second, resumed = map(load, ("one", "two", "three"))
  yield {
    "ends": ended,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(first)),
    "second_run_is_same": _is_same(first, second),
    "second_run_difference": difference(second, first),
    "resumed_run_is_same": _is_same(first, resumed),
    "resumed_run_difference": difference(resumed, first),
  }


def _is_same(first: Any, second: Any) -> bool:
  try:
    comparing.assert_same_trees(first, second)
  except AssertionError:
    return False
  return True


# Steps beside the plain formulation.


@dataclasses.dataclass(frozen=True)
class Step:
  """Scores of a batch, in two formulations.

  Attributes:
    network: of which the parameters are.
    scores: `(params, batch) -> [G, C]` of the project, and the batch.
    plain_scores: of the plain formulation, and its batch.
    target: `[G, C]`.
  """

  network: Any
  scores: tuple[Callable[[Any, Any], jax.Array], Any]
  plain_scores: tuple[Callable[[Any, Any], jax.Array], Any]
  target: np.ndarray


def sage(small: bool) -> Step:
  """GraphSAGE 128 x 3, one program."""
  size = dict(nodes=500, config_nodes=25, configs=8)
  size = size if small else dict(nodes=10_000, config_nodes=500, configs=64)
  network = _ranker("xla-random,full", model__hidden_dim=128).family.network
  return _beside_plain(network, workloads.layout_batch(graphs=1, hops=network.hops, **size))


def res_model(small: bool) -> Step:
  """The official layout model, eight programs, gradients through blocks of nodes."""
  size = dict(graphs=2, nodes=500, config_nodes=25, configs=8, keep_nodes=400)
  if not small:
    size = dict(graphs=8, nodes=6_000, config_nodes=250, configs=16, keep_nodes=5_000)
  network = _ranker("xla-random,official").family.network
  return _beside_plain(network, workloads.layout_batch(hops=network.hops, **size))


def third(small: bool) -> Step:
  """The 3rd place, two programs."""
  graphs, nodes, configs = (2, 300, 4) if small else (2, 6_000, 16)
  return _beside_copies("xla-random,preset=third", graphs, nodes, configs)


def tables(small: bool) -> Step:
  """Score tables, two programs."""
  graphs, nodes, configs = (2, 300, 8) if small else (2, 6_000, 64)
  return _beside_copies("xla-random,tables", graphs, nodes, configs)


def gst_ed(small: bool) -> Step:
  """Graph Segment Training: the segment that gets gradients, of one program."""
  nodes, configs = (2_000, 8) if small else (20_000, 64)
  ranker, program = _ranker("xla-random,gst_ed"), _program(nodes, configs)
  fit(ranker, data_of(ranker.config), [program])
  prepared = ranker.prepare(program)
  slate = SegmentSlate(
    prepared, np.arange(configs), np.arange(configs, dtype=np.float32), 0, np.zeros(1, np.int64)
  )
  batch = ranker.family.assemble([slate], _budget([prepared]), graphs=1, configs=configs)
  return _beside_plain(ranker.family.network.model, batch.fresh)


def _beside_plain(network: Any, batch: Any) -> Step:
  """A network beside its formulation in `plain`."""
  name = "res_model" if type(network).__name__ == "ResModel" else "layout_sage"
  return Step(
    network,
    (lambda params, batch: network.apply({"params": params}, batch, train=True), batch),
    (getattr(plain, name), plain.from_layout(batch)),
    batch.target,
  )


def _beside_copies(variant: str, graphs: int, nodes: int, configs: int) -> Step:
  """A network beside itself on batches in which every configuration has a graph of its own."""
  ranker, target = _ranker(variant), np.arange(configs, dtype=np.float32)
  programs = [_program(nodes, configs, seed) for seed in range(graphs)]
  fit(ranker, data_of(ranker.config), programs)
  slates = [
    Slate(graph, np.arange(configs), target, number)
    for number, graph in enumerate(map(ranker.prepare, programs))
  ]
  copies = [
    Slate(slate.graph, slate.config_ids[[c]], target[[c]], slate.graph_id)
    for slate in slates
    for c in range(configs)
  ]
  network = ranker.family.network
  apply = lambda params, batch: network.apply({"params": params}, batch).reshape(graphs, configs)
  assemble = lambda slates, configs: ranker.family.assemble(
    slates, _budget([slate.graph for slate in slates]), graphs=len(slates), configs=configs
  )
  batch = assemble(slates, configs)
  return Step(network, (apply, batch), (apply, assemble(copies, 1)), batch.target)


def _ranker(variant: str, **changes: Any) -> Ranker:
  return Ranker(configs.load(f"layout.py:{variant}").replace(**changes))


def _program(nodes: int, configs: int, seed: int = 0) -> Any:
  rng = np.random.default_rng(seed)
  return workloads.program(rng, nodes=nodes, config_nodes=nodes // 25, configs=configs)


def _budget(graphs: list[Any]) -> dict[str, int]:
  (budget,) = plan.choose_budgets([batching.total_sizes(graphs)])
  return budget


def compare(make: Callable[[bool], Step], small: bool, repeats: int) -> Iterator[Figures]:
  """Differences, peaks and XLA's estimates of both formulations; seconds if there are repeats."""
  step = make(small)
  (_, batch), target = step.scores, jnp.asarray(step.target)
  params = jax.device_put(training.init_params(step.network, batch, seed=0))

  def loss(params, batch, scores):
    predicted = scores(params, batch)
    sums = losses.loss_sums(_LOSSES, predicted, target, where=jnp.ones(target.shape, bool))
    return losses.combine(_LOSSES, *sums), predicted

  programs, functions, results, figures = {}, {}, {}, {}
  for name, (scores, batch) in (("ours", step.scores), ("plain", step.plain_scores)):
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, scores=scores), has_aux=True))
    batch = jax.device_put(batch)
    with jax.default_matmul_precision("highest"):  # as the networks' own default
      started = time.perf_counter()
      programs[name] = gradient.lower(params, batch).compile()
    functions[name] = functools.partial(programs[name], params, batch)
    if not repeats:  # else the cache has the program
      figures[f"{name}_compile_s"] = time.perf_counter() - started
    results[name] = jax.tree.map(np.asarray, functions[name]())
    if repeats and not figures.get("ours_ms"):  # the plain formulation may not compile in time
      figures["ours_ms"] = 1e3 * timing.medians({name: functions[name]}, repeats=repeats)[name]
    figures[f"{name}_peak_mib"] = log.peak_memory()[1] / 2**20
    yield figures
  ((value, scored), grads), ((plain_value, plain_scored), plain_grads) = results.values()
  figures["scores"] = difference(scored, plain_scored)
  figures["loss"] = difference(value, plain_value)
  figures["gradients"] = difference(grads, plain_grads)
  yield figures
  if repeats:
    seconds = timing.medians(functions, repeats=repeats)
    figures |= {f"{name}_ms": 1e3 * seconds[name] for name in functions}
    figures["ratio"] = seconds["plain"] / seconds["ours"]
    yield figures
  for name, program in programs.items():
    figures |= {f"{name}_{key}": value for key, value in _estimates(program).items()}
  yield figures


def _estimates(compiled: Any) -> Figures:
  """XLA's estimates of a compiled program: MiB of temporaries and, for a known GPU, times."""
  figures = {"temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20}
  kind = jax.devices()[0].device_kind.lower()
  gpu = next((gpu for name, gpu in gpus.GPUS.items() if name in kind), None)
  return figures | (optimised.Module(compiled).times(gpu, exact=True) if gpu else {})


def compare_segments(small: bool, repeats: int) -> Iterator[Figures]:
  """`compare`, then training steps on a segment and on the whole program, with their batches."""
  for figures in compare(gst_ed, small, repeats):
    yield figures
  for variant in ("gst_ed", "full"):
    measured = gst.measure(variant, 2_000 if small else 20_000, repeats=max(1, repeats))
    if repeats:
      figures |= {f"{variant}_step_ms": 1e3 * measured["step_s"]}
      yield figures


# Layouts of own programs.


def tune(source: str, small: bool) -> Iterator[Figures]:
  """The choice of `tpugraphs_jax.tune` for a program of `examples/programs`."""
  import tpugraphs_jax
  from tpugraphs_jax.tuning import programs

  (program,) = programs.load(str(ROOT / "examples/programs" / source))
  tuned = tpugraphs_jax.tune(program.function, *program.args, budget=2 if small else 8)
  default = tuned.raw[tuned.problem.default]
  yield {
    "program": program.name,
    "labelled": len(tuned.raw),
    "failed": tuned.failed,
    "own_ms": 1e3 * min(default["seconds"]),
    "noise": default["noise"],
    "keeps_default": tuned.keeps_default,
    "compared": tuned.compared,
    "least": min(tuned.tried.values()) / tuned.tried[tuned.problem.default],
  }


# Parts by name: checks that time nothing, steps, and choices of layouts.
_CHECKS: dict[str, Callable[[bool], Iterator[Figures]]] = {
  "parity_tile": functools.partial(parity, "tile"),
  "parity_layout": functools.partial(parity, "layout"),
  "training": run_training,
}
_STEPS: dict[str, Callable[[bool, int], Iterator[Figures]]] = {
  "gst_ed": compare_segments,
  "third": functools.partial(compare, third),
  "SAGE": functools.partial(compare, sage),
  "ResModel": functools.partial(compare, res_model),
  "tables": functools.partial(compare, tables),
}
_TUNED: dict[str, Callable[[bool], Iterator[Figures]]] = {
  "tune_attention": functools.partial(tune, "attention.py:layer_train"),
  "tune_conv": functools.partial(tune, "residual.py:basic_train"),
}
PARTS = [*_CHECKS, *_STEPS, *_TUNED]


class Process:
  """A part that runs in a process of its own and writes its figures to a file."""

  def __init__(self, name: str, folder: Path, *options: str):
    self.name, self._out = name, folder / f"{name}.json"
    flags = _FLAGS.get(name, _STEP_FLAGS if name in _STEPS else "")
    self._process = subprocess.Popen(
      [sys.executable, "-m", _MODULE, "--only", name, "--out", self._out, *options],
      env={"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
      | os.environ
      | {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes share the device
      },
      start_new_session=True,
    )

  def wait(self, until: float) -> Figures:
    """The figures found until a time of `time.monotonic`, with `failure` where there was one."""
    why = "ended with code {}"
    try:
      self._process.wait(max(0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
      os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()
      why = _NO_TIME
    result = json.loads(self._out.read_text()) if self._out.exists() else {}
    if not result.get("is_done") and "failure" not in result:
      result["failure"] = why.format(self._process.returncode)
    return result


def run_here(name: str, small: bool, timed: bool, out: Path) -> None:
  """Runs a part in this process; writes its figures after each."""
  if small:
    parallel.compile_quickly()
  result: Figures = {"machine": timing.machine(), "figures": {}}
  timing.write(result, out)
  repeats = (3 if small else 15) if timed else 0
  part = functools.partial(_STEPS[name], repeats=repeats) if name in _STEPS else None
  try:
    for figures in (part or (_CHECKS | _TUNED)[name])(small):
      result["figures"] |= figures
      timing.write(result, out)
    result["is_done"] = True
  except Exception as error:  # whatever it is, it is named, and costs this part alone
    result["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    raise
  finally:
    timing.write(result, out)


def run_all(names: list[str], small: bool, seconds: float, record: Figures) -> Figures:
  """The record of all parts, added to an earlier one."""
  started = time.monotonic()
  record = {"machine": {}, "failures": {}, "seconds": {}} | record | {"small": small}
  options = ["--small"] * small

  def keep(process: Process, until: float, begun: float) -> None:
    result, name = process.wait(until), process.name
    record["machine"] = result.get("machine") or record["machine"]
    record[name] = record.get(name, {}) | result.get("figures", {})
    record["seconds"][name] = record["seconds"].get(name, 0) + round(time.monotonic() - begun, 1)
    record["failures"].pop(name, None)
    if "failure" in result:
      record["failures"][name] = result["failure"]
    print(f"{name}: {record['seconds'][name]} s {result.get('failure', '')}", flush=True)

  for name in names:
    record["seconds"].pop(name, None)
  with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch)
    together = [Process(name, folder, *options) for name in names if name not in _TUNED]
    for process in together:
      keep(process, started + _CHECKS_SECONDS * seconds / _SECONDS, started)
    for name in names:
      begun = time.monotonic()
      if name not in _CHECKS and begun < started + seconds:
        keep(Process(name, folder, "--timed", *options), started + seconds, begun)
      elif name not in _CHECKS:
        record["failures"][name] = _NO_TIME
  record["all_seconds"] = round(time.monotonic() - started, 1)
  return record


# Pages.


def table(record: Mapping[str, Any]) -> str:
  """The record as two Markdown tables, with the machine above and failures below."""
  machine = record["machine"]
  lines = [
    f"{machine.get('device', 'unknown device')}, jax {machine.get('jax')}, {machine.get('date')}"
    + ("; small sizes, which say nothing about speed" if record["small"] else ""),
    pages.table(
      [
        "step",
        "ours",
        "plain",
        "ratio",
        "peak ours",
        "peak plain",
        "scores differ by",
        "gradients",
        "XLA's estimates of ours: time, temporaries",
      ],
      [_step_cells(name, record[name]) for name in _STEPS if record.get(name)],
    ),
    pages.table(["check", "result"], list(_checks(record))),
  ]
  lines += [f"`{name}` failed: {why}" for name, why in record["failures"].items()]
  return "\n\n".join(lines)


def _step_cells(name: str, row: Mapping[str, Any]) -> list[str]:
  cell = lambda key, form: form.format(row[key]) if key in row else "not measured"
  return [
    name,
    *(cell(f"{side}_ms", "{:,.2f} ms") for side in ("ours", "plain")),
    cell("ratio", "{:.1f} x"),
    *(cell(f"{side}_peak_mib", "{:,.0f} MiB") for side in ("ours", "plain")),
    *(cell(key, "{:.0e}") for key in ("scores", "gradients")),
    (cell("ours_estimated_ms", "{:,.2f} ms, ") if "ours_estimated_ms" in row else "")
    + cell("ours_temporary_mib", "{:,.0f} MiB"),
  ]


def _checks(record: Mapping[str, Any]) -> Iterator[list[str]]:
  for kind in ("tile", "layout"):
    if rows := record.get(f"parity_{kind}"):
      largest: dict[str, float] = {}
      for row in rows.values():
        largest |= {what: _larger(value, largest.get(what, 0)) for what, value in row.items()}
      told = ", ".join(f"{what} {value:.0e}" for what, value in largest.items())
      yield [f"official models of {kind}s, recorded cases: {len(rows)}, largest difference", told]
  if row := record.get("training"):
    for name, what in (("second", "a second run"), ("resumed", "a run that was resumed")):
      same = row[f"{name}_run_is_same"]
      told = "bit for bit" if same else f"differs by {row[f'{name}_run_difference']:.0e}"
      yield [f"{what}, `train.deterministic`", told]
  if "gst_ed_step_ms" in (row := record.get("gst_ed", {})):
    whole = f"{row['full_step_ms']:,.1f} ms" if "full_step_ms" in row else "not measured"
    yield [
      "training step with its batch, `gst_ed` beside the whole program",
      f"{row['gst_ed_step_ms']:,.1f} ms, {whole}",
    ]
  for name in _TUNED:
    if row := record.get(name):
      ratio = (
        "none" if row["keeps_default"] else "{:.3f} ({:.3f} to {:.3f})".format(*row["compared"])
      )
      yield [
        f"`tune` for `{row['program']}`, {row['labelled']} layouts timed, {row['failed']} failed",
        f"{row['own_ms']:.3f} ms by the compiler's own choice, time of a better one: {ratio}",
      ]


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
  parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
  parser.add_argument(
    "--seconds",
    type=float,
    default=_SECONDS,
    help="most for all parts; the checks take up to 57 %% of them",
  )
  parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # in this process
  parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)  # with --only
  parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)  # see `train`
  parser.add_argument("--stop_at", type=int, default=0, help=argparse.SUPPRESS)
  parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.train:
    train(*args.train, small=args.small, stop_at=args.stop_at, resume=args.resume)
  elif args.only:
    run_here(args.only, args.small, args.timed, args.out)
  else:
    adds = args.parts != PARTS and args.out and args.out.exists()
    earlier = json.loads(args.out.read_text()) if adds else {}
    record = run_all(args.parts, args.small, args.seconds, earlier)
    print(table(record))
    timing.write(record, args.out)


if __name__ == "__main__":
  main()
