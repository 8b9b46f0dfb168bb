"""Checks and times the project on the accelerator at hand, in at most eight minutes.

    python benchmarks/device.py --out device.json
    JAX_PLATFORMS=cpu python benchmarks/device.py --small

It needs jax for the device and the packages of `device.txt`. Each part runs in a process of its
own and within its share of the seconds that are left. A part that fails or takes longer is named in
the record under `failures`, with the figures that it had found; the others go on. The first three
parts time nothing and run together.

If `--out` exists, the parts run first that it lacks or that failed. Figures of parts that have not
finished this time stay, if they are of the same device and the same jax.

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
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
import comparing
import gpus
import gst
import jax
import jax.numpy as jnp
import numpy as np
import optimised
import pages
import plain
import timing
import workloads

from tpugraphs_jax import losses, synthetic
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import ranker
from tpugraphs_jax.rankers.segments.batches import SegmentSlate
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log, training
from tpugraphs_jax.train.experiment import Experiment

Figures = dict[str, Any]
_SECONDS = 460  # of all parts
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
  sys.path.insert(0, str(ROOT / "tests" / "rankers"))
  import test_official_parity

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


def _larger(one: float, other: float) -> float:
  """The larger number, NaN where one is NaN."""
  return float(np.maximum(one, other))


# Runs.


def train(folder: str, data_root: str, *, small: bool, stop_at: int, resume: bool) -> None:
  """A deterministic run of Graph Segment Training on tiny data; SIGTERM ends it at `stop_at`."""
  config = configs.load(f"layout.py:xla-random,gst_ed{',ci' if small else ''}")
  config.update_from_flattened_dict(
    {
      "data_root": data_root,
      "segments.max_nodes": 50,
      "train.deterministic": True,
      "train.result": "last",
      "train.epochs": 3,
      "train.log_every_steps": 1,
      "train.valid_configs": 20,
      "batch.slates_per_epoch": 64,
    }
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
      line = [sys.executable, __file__, "--train", f"{scratch}/{name}", str(root), *more]
      line += ["--small"] * small
      return subprocess.Popen(line, stdout=subprocess.DEVNULL)

    ended = [run.wait() for run in (start("one"), start("two"), start("three", "--stop_at", "6"))]
    ended.append(start("three", "--resume").wait())
    load = lambda name: ranker.load(f"{scratch}/{name}").params
    one, two, three = map(load, ("one", "two", "three"))
  yield {
    "ends": ended,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(one)),
    "second_run_is_same": _is_same(one, two),
    "second_run_difference": difference(two, one),
    "resumed_run_is_same": _is_same(one, three),
    "resumed_run_difference": difference(three, one),
  }


def _is_same(one: Any, other: Any) -> bool:
  try:
    comparing.assert_same_trees(one, other)
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
  network = _experiment("xla-random,full", {"model.hidden_dim": 128}).ranker.family.network
  return _beside_plain(network, workloads.layout_batch(graphs=1, hops=network.hops, **size))


def res_model(small: bool) -> Step:
  """The official layout model, eight programs, gradients through blocks of nodes."""
  size = dict(graphs=2, nodes=500, config_nodes=25, configs=8, keep_nodes=400)
  if not small:
    size = dict(graphs=8, nodes=6_000, config_nodes=250, configs=16, keep_nodes=5_000)
  network = _experiment("xla-random,official").ranker.family.network
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
  experiment = _experiment("xla-random,gst_ed")
  program = _program(nodes, configs)
  experiment.fit_transforms([program])
  prepared = experiment.ranker.prepare(program)
  slate = SegmentSlate(
    prepared, np.arange(configs), np.arange(configs, dtype=np.float32), 0, np.zeros(1, np.int64)
  )
  batch = experiment.ranker.family.assemble([slate], _budget([prepared]), graphs=1, configs=configs)
  return _beside_plain(experiment.ranker.family.network.model, batch.fresh)


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
  experiment, target = _experiment(variant), np.arange(configs, dtype=np.float32)
  programs = [_program(nodes, configs, seed) for seed in range(graphs)]
  experiment.fit_transforms(programs)
  slates = [
    Slate(graph, np.arange(configs), target, number)
    for number, graph in enumerate(experiment.prepare(programs))
  ]
  copies = [
    Slate(slate.graph, slate.config_ids[[c]], target[[c]], slate.graph_id)
    for slate in slates
    for c in range(configs)
  ]
  network = experiment.ranker.family.network
  apply = lambda params, batch: network.apply({"params": params}, batch).reshape(graphs, configs)
  assemble = lambda slates, configs: experiment.ranker.family.assemble(
    slates, _budget([each.graph for each in slates]), graphs=len(slates), configs=configs
  )
  batch = assemble(slates, configs)
  return Step(network, (apply, batch), (apply, assemble(copies, 1)), batch.target)


def _experiment(variant: str, changes: Mapping[str, Any] = {}) -> Experiment:
  config = configs.load(f"layout.py:{variant}")
  config.update_from_flattened_dict(dict(changes))
  return Experiment.of(config)


def _program(nodes: int, configs: int, seed: int = 0) -> Any:
  rng = np.random.default_rng(seed)
  return workloads.program(rng, nodes=nodes, config_nodes=nodes // 25, configs=configs)


def _budget(graphs: list[Any]) -> dict[str, int]:
  (budget,) = plan.choose_budgets([batching.total_sizes(graphs)])
  return budget


def compare(make: Callable[[bool], Step], small: bool) -> Iterator[Figures]:
  """Differences, seconds, peaks and XLA's estimates of both formulations."""
  step = make(small)
  (_, batch), target = step.scores, jnp.asarray(step.target)
  params = jax.device_put(training.init_params(step.network, batch, seed=0))

  def loss(params, batch, scores):
    found = scores(params, batch)
    sums = losses.loss_sums(_LOSSES, found, target, where=jnp.ones(target.shape, bool))
    return losses.combine(_LOSSES, *sums), found

  programs, functions, results, figures = {}, {}, {}, {}
  for name, (scores, batch) in (("ours", step.scores), ("plain", step.plain_scores)):
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, scores=scores), has_aux=True))
    batch = jax.device_put(batch)
    with jax.default_matmul_precision("highest"):  # as the networks' own default
      started = time.perf_counter()
      programs[name] = gradient.lower(params, batch).compile()
    functions[name] = functools.partial(programs[name], params, batch)
    figures[f"{name}_compile_s"] = time.perf_counter() - started
    results[name] = jax.tree.map(np.asarray, functions[name]())
    figures[f"{name}_peak_mib"] = log.peak_memory()[1] / 2**20
    yield figures
  ((value, found), grads), ((plain_value, plain_found), plain_grads) = results.values()
  figures["scores"] = difference(found, plain_found)
  figures["loss"] = difference(value, plain_value)
  figures["gradients"] = difference(grads, plain_grads)
  yield figures
  seconds = timing.medians(functions, repeats=3 if small else 15)
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


def compare_segments(small: bool) -> Iterator[Figures]:
  """`compare`, then training steps on a segment and on the whole program, with their batches."""
  for figures in compare(gst_ed, small):
    yield figures
  for variant in ("gst_ed", "full"):
    measured = gst.measure(variant, 2_000 if small else 20_000, repeats=3 if small else 15)
    figures |= {f"{variant}_step_ms": 1e3 * measured["step_s"]}
    yield figures


# Layouts of own programs.


def tune(source: str, small: bool) -> Iterator[Figures]:
  """The choice of `tpugraphs_jax.tune` for a program of `examples/programs`."""
  import tpugraphs_jax
  from tpugraphs_jax.tuning import programs

  (program,) = programs.load(str(ROOT / "examples/programs" / source))
  tuned = tpugraphs_jax.tune(program.function, *program.args, budget=2 if small else 8)
  own = tuned.raw[tuned.problem.own]
  yield {
    "program": program.name,
    "labelled": len(tuned.raw),
    "failed": tuned.failed,
    "own_ms": 1e3 * min(own["seconds"]),
    "noise": own["noise"],
    "keeps_default": tuned.keeps_default,
    "compared": tuned.compared,
    "least": min(tuned.tried.values()) / tuned.tried[tuned.problem.own],
  }


# Parts by name, with the seconds that they are expected to take on a GPU, compilation included.
_TOGETHER: dict[str, tuple[Callable[[bool], Iterator[Figures]], int]] = {
  "parity_tile": (functools.partial(parity, "tile"), 120),
  "parity_layout": (functools.partial(parity, "layout"), 120),
  "training": (run_training, 120),
}
_STEPS = {
  "SAGE": functools.partial(compare, sage),
  "ResModel": functools.partial(compare, res_model),
  "gst_ed": compare_segments,
  "third": functools.partial(compare, third),
  "tables": functools.partial(compare, tables),
}
_TUNED = {
  "tune_conv": functools.partial(tune, "residual.py:basic_train"),
  "tune_attention": functools.partial(tune, "attention.py:layer_train"),
}
_SLOW = {"third": 200}
PARTS = _TOGETHER | {name: (part, _SLOW.get(name, 75)) for name, part in (_STEPS | _TUNED).items()}


class Process:
  """A part that runs in a process of its own and writes its figures to a file."""

  def __init__(self, name: str, folder: Path, small: bool):
    self.name, self._out = name, folder / f"{name}.json"
    flags = _FLAGS.get(name, _STEP_FLAGS if name in _STEPS else "")
    self._process = subprocess.Popen(
      [sys.executable, __file__, "--only", name, "--out", self._out, *["--small"] * small],
      env=os.environ
      | {
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
    found = json.loads(self._out.read_text()) if self._out.exists() else {}
    if not found.get("is_done") and "failure" not in found:
      found["failure"] = why.format(self._process.returncode)
    return found


def run_here(name: str, small: bool, out: Path) -> None:
  """Runs a part in this process; writes its figures after each."""
  if small:
    parallel.compile_quickly()
  found: Figures = {"machine": timing.machine(), "figures": {}}
  timing.write(found, out)
  try:
    for figures in PARTS[name][0](small):
      found["figures"] |= figures
      timing.write(found, out)
    found["is_done"] = True
  except Exception as error:  # whatever it is, it is named, and costs this part alone
    found["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    raise
  finally:
    timing.write(found, out)


def run_all(groups: list[list[str]], small: bool, seconds: float) -> Figures:
  """The record of groups of parts; the parts of a group run together."""
  started = time.monotonic()
  end = started + seconds
  record: Figures = {"machine": {}, "small": small, "failures": {}, "seconds": {}}

  def keep(process: Process, until: float) -> None:
    found, name = process.wait(until), process.name
    record["machine"] = record["machine"] or found.get("machine", {})
    record[name] = found.get("figures", {})
    record["seconds"][name] = round(time.monotonic() - begun, 1)
    if "failure" in found:
      record["failures"][name] = found["failure"]
    print(f"{name}: {record['seconds'][name]} s {found.get('failure', '')}", flush=True)

  expected = [max(PARTS[name][1] for name in group) for group in groups]
  with tempfile.TemporaryDirectory() as folder:
    for number, group in enumerate(groups):
      begun = time.monotonic()
      until = begun + (end - begun) * expected[number] / sum(expected[number:])
      for process in [Process(name, Path(folder), small) for name in group if begun < end]:
        keep(process, until)
      record["failures"] |= {name: _NO_TIME for name in group if name not in record}
  record["all_seconds"] = round(time.monotonic() - started, 1)
  return record


def has(record: Mapping[str, Any], name: str) -> bool:
  """Whether a record has all figures of a part."""
  return bool(record.get(name)) and name not in record["failures"]


def in_groups(names: list[str], earlier: Mapping[str, Any]) -> list[list[str]]:
  """The parts in the order in which they run: first those that an earlier record lacks."""
  groups = []
  for is_there in (False, True):
    some = [name for name in names if has(earlier, name) == is_there]
    groups.append([name for name in some if name in _TOGETHER])
    groups += [[name] for name in some if name not in _TOGETHER]
  return [group for group in groups if group]


def with_earlier(record: Figures, earlier: Mapping[str, Any]) -> Figures:
  """The record with the figures of an earlier one for parts that it lacks.

  The earlier one counts if it is of the same device, jax and sizes.
  """
  alike = lambda key: record["machine"].get(key) == earlier["machine"].get(key)
  if not earlier or record["small"] != earlier["small"] or not (alike("device") and alike("jax")):
    return record
  for name in PARTS:
    if name in earlier and not has(record, name) and (has(earlier, name) or not record.get(name)):
      for part in ("failures", "seconds"):
        record[part].pop(name, None)
        record[part] |= {key: why for key, why in earlier[part].items() if key == name}
      record[name] = earlier[name]
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
    *(cell(f"{each}_ms", "{:,.2f} ms") for each in ("ours", "plain")),
    cell("ratio", "{:.1f} x"),
    *(cell(f"{each}_peak_mib", "{:,.0f} MiB") for each in ("ours", "plain")),
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
  parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
  parser.add_argument("--seconds", type=float, default=_SECONDS, help="most for all parts")
  parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # in this process
  parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)  # see `train`
  parser.add_argument("--stop_at", type=int, default=0, help=argparse.SUPPRESS)
  parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.train:
    train(*args.train, small=args.small, stop_at=args.stop_at, resume=args.resume)
  elif args.only:
    run_here(args.only, args.small, args.out)
  else:
    there = args.out is not None and args.out.exists()
    earlier = json.loads(args.out.read_text()) if there else {}
    groups = in_groups(args.parts, earlier)
    record = with_earlier(run_all(groups, args.small, args.seconds), earlier)
    print(table(record))
    timing.write(record, args.out)


if __name__ == "__main__":
  main()
