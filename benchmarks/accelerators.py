"""Compiles training and scoring steps of every model family for TPUs and GPUs, without either.

    python -m venv ENV
    ENV/bin/pip install . -r benchmarks/compilers.txt
    ENV/bin/python -m benchmarks.accelerators
    ENV/bin/python -m benchmarks.accelerators --targets h100 --cases SAGE --devices 8

Each step is compiled in a process of its own, with one program of 6,000 nodes or ten kernels of 40
on each device. TPUs are all devices of the smallest topology of a generation. Nothing runs on an
accelerator: `compile_s` is measured, kernels are counted, and times are estimates. For TPUs these
are two of the TPU compiler, which disagree: the cycles of all kernels, and the optimal time. For
GPUs they are the sum of XLA's cost models and the roofline, see `optimised.Module.times`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import importlib.metadata
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from benchmarks import gpus, optimised, pages, ranker_steps, timing
from tpugraphs_jax.data import batching
from tpugraphs_jax.hlo import tpu, tpu_kernels
from tpugraphs_jax.infra import files, parallel
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.run import configs, variants

# Config and changed fields, by the name of a case.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
  "tile": ("tile.py:recommended", {}),
  "ResModel": ("layout.py:xla-random,official", {}),
  "SAGE": ("layout.py:xla-random,full", {}),
  "tables": ("layout.py:xla-random,tables", {}),
  "gst_ed": ("layout.py:xla-random,gst_ed", {}),
}
# To compare with each other: compiled only if they are named.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
  "SAGE, tables of 4 slots": ("layout.py:xla-random,full", {"data.neighbour_slots": 4}),
  "SAGE, sorted segment sums": ("layout.py:xla-random,full", {"data.neighbour_slots": 0}),
  "SAGE, bfloat16": (
    "layout.py:xla-random,full",
    {"model.dtype": "bfloat16", "model.precision": "default"},
  ),
  "SAGE, deterministic": ("layout.py:xla-random,full", {"train.deterministic": True}),
  "SAGE, four programs": ("layout.py:xla-random,full", {"batch.graphs": 4, "eval.graphs": 4}),
  **{
    f"{kind}, {name}": (f"{kind}.py:{name}", {})
    for kind in ("layout", "tile")
    for name in variants.systems(kind)
    if name.startswith("preset=")
  },
}
# Cases of all families but `systems` that compile in seconds: at most one round of message passing.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
  f"{name}, small": (f"{config},ci", {})
  for name, config in {
    "tile": "tile.py:recommended",
    "late join": "tile.py:LateJoinSAGE",
    "ResModel": "layout.py:official",
    "SAGE": "layout.py:full",
    "gst_ed": "layout.py:gst_ed",
    "tables": "layout.py:tables",
    "own": "layout.py:own,recommended",
  }.items()
}
TPUS = ("v3", "v4", "v5e", "v6e")
# GiB of memory of a chip. The smallest topology of each generation has four chips.
_CHIP_GIB = {"v3": 32, "v4": 32, "v5e": 16, "v6e": 32}
_CHIPS = 4
_NODES, _SMALL_NODES, _KERNELS = 6_000, 200, 10
_RECORD = Path(__file__).with_suffix(".json")
# In the message of XLA's compiler where Triton cannot compute a product that was not tuned.
_TRITON_FAILS = "Couldn't find output tile sizes"


def config_of(case: str, target: str) -> Config:
  """The config of a case, for one program or ten kernels on each device."""
  name, changes = (CASES | OTHERS | SMALL)[case]
  config = configs.load(name)
  slots = batching.slots_of("tpu" if target in TPUS else "gpu")
  graphs = _KERNELS if config.kind == "tile" else 1
  return config.replace(batch__graphs=graphs, data__neighbour_slots=slots, **changes)


def measure(case: str, step: str, target: str, count: int) -> dict[str, Any]:
  """Compiles a step; returns what the compiler says about it.

  Args:
    case: a key of `CASES`, `OTHERS` or `SMALL`.
    step: one of `ranker_steps.STEPS`.
    target: one of `TPUS` or a key of `gpus.GPUS`.
    count: of devices; 0: one GPU, or all devices of the topology of a TPU.
  """
  config = config_of(case, target)
  if config.train.deterministic:
    parallel.compute_deterministically()
  is_tpu = target in TPUS
  devices = tpu.devices(f"tpu:{target}") if is_tpu else gpus.devices(target, count or 1)
  devices = devices[: count or len(devices)]
  lowered = ranker_steps.lower(
    config, step, devices, nodes=_SMALL_NODES if case in SMALL else _NODES
  )
  started = time.perf_counter()
  with tempfile.TemporaryDirectory() as folder:
    compiled = _compiled(lowered, {} if is_tpu else {"xla_dump_to": folder})
    row = {
      **_versions(is_tpu),
      "devices": len(devices),
      "compile_s": time.perf_counter() - started,
      "precision": config.model.precision,
      "products": dict(ranker_steps.products(lowered)),
      **optimised.launched(folder),
    }
  module = optimised.Module(compiled)
  row |= module.counts() | _memory(compiled.memory_analysis())
  if not is_tpu:
    return row | module.times(gpus.GPUS[target], exact=config.model.precision == "highest")
  cycles = tpu_kernels.estimated_cycles(module.proto)
  return row | {
    "core_gib": _CHIP_GIB[target] * _CHIPS / len(tpu.devices(f"tpu:{target}")),
    "estimated_cycles": cycles.cycles,
    "kernels_without_estimate": cycles.without_estimate,
    "optimal_ms": 1e3 * compiled.cost_analysis()["optimal_seconds"],
  }


def _versions(is_tpu: bool) -> dict[str, str]:
  known = timing.machine()
  compiler = "libtpu" if is_tpu else "jax-cuda12-pjrt"
  return {
    "date": known["date"],
    "jax": known["jax"],
    "compiler": f"{compiler} {importlib.metadata.version(compiler)}",
  }


def _compiled(lowered: Any, options: dict[str, Any]) -> Any:
  try:
    return lowered.compile(compiler_options=options)
  except Exception as error:  # jax has no public class for it
    if _TRITON_FAILS not in str(error):
      raise
    return lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})


def _memory(stats: Any) -> dict[str, float]:
  return {
    "code_mb": stats.generated_code_size_in_bytes / 1e6,
    "argument_mib": stats.argument_size_in_bytes / 2**20,
    "temporary_mib": stats.temp_size_in_bytes / 2**20,
    "output_mib": (stats.output_size_in_bytes - stats.alias_size_in_bytes) / 2**20,
  }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
  """The recorded steps as a Markdown table, in the order of cases, steps and targets."""
  cases, targets = list(CASES | OTHERS | SMALL), [*TPUS, *gpus.GPUS]

  def place(name):
    case, step, target = name.split("/")
    return cases.index(case), ranker_steps.STEPS.index(step), targets.index(target)

  rows = []
  for name in sorted(results, key=place):
    (case, step, target), row = name.split("/"), results[name]
    cells = [row["error"]] + [""] * 5 if "error" in row else _cells(row)
    rows.append([f"{case}, {step}", target, *cells])
  return pages.table(
    [
      "step",
      "for",
      "arguments + temporaries",
      "kernels",
      "in loops",
      "products by precision",
      "estimate",
      "roofline, optimal",
    ],
    rows,
  )


def _cells(row: Mapping[str, Any]) -> list[str]:
  products = ", ".join(f"{count} {name}" for name, count in sorted(row["products"].items()))
  return [
    f"{row['argument_mib']:,.0f} + {row['temporary_mib']:,.0f} MiB",
    f"{row['kernels']:,}",
    f"{row['kernels_in_loops']:,}",
    products,
    *_estimates(row),
  ]


def _estimates(row: Mapping[str, Any]) -> tuple[str, str]:
  if "roofline_ms" in row:
    return f"{row['estimated_ms']:.2f} ms", f"{row['roofline_ms']:.2f} ms"
  missing = row["kernels_without_estimate"]
  unknown = f", {missing} kernels unknown" if missing else ""
  # Negative seconds mean that a part of a step has no estimate.
  optimal = f"{row['optimal_ms']:.2f} ms" if row["optimal_ms"] > 0 else "unknown"
  return f"{row['estimated_cycles'] / 1e6:.2f} M cycles{unknown}", optimal


def in_fresh_process(name: str, target: str, count: int) -> dict[str, Any]:
  """`measure` of a step `CASE/STEP`; a step that was not compiled has `error`, a line of output."""
  ended = subprocess.run(
    [sys.executable, "-m", "benchmarks.accelerators", "--only", target, str(count), name],
    capture_output=True,
    text=True,
  )
  rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
  return rows[0] if rows else {"error": _why(ended.stderr)}


def _why(message: str) -> str:
  """The last line of standard error that names an exception, or the last line."""
  lines = message.strip().splitlines() or ["no message"]
  named = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
  return (named or lines)[-1][:200]


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument(
    "--targets", nargs="+", default=("v3", "h100", "a100", "t4"), choices=[*TPUS, *gpus.GPUS]
  )
  parser.add_argument("--cases", nargs="+", default=list(CASES), choices=[*CASES, *OTHERS, *SMALL])
  parser.add_argument("--steps", nargs="+", default=ranker_steps.STEPS, choices=ranker_steps.STEPS)
  parser.add_argument(
    "--devices",
    type=int,
    default=0,
    help="how many; one GPU or all TPUs of a topology unless given",
  )
  parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)  # see `compile_here`
  args = parser.parse_args()
  if args.only:
    target, count, *names = args.only
    compile_here(names, target, int(count))
    return
  for target in args.targets:
    for name in (f"{case}/{step}" for case in args.cases for step in args.steps):
      row = {f"{name}/{target}": in_fresh_process(name, target, args.devices)}
      print(table(row).splitlines()[-1], flush=True)
      record(row, args.out or _RECORD)


def compile_here(names: Sequence[str], target: str, count: int) -> None:
  """Prints `measure` of steps `CASE/STEP`; the environment changes before jax is first used."""
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"
  if target not in TPUS:
    os.environ.update(gpus.environment(dict(os.environ)))
  jax.config.update("jax_platforms", "cpu")
  for name in names:
    print(json.dumps(measure(*name.split("/"), target, count)), flush=True)


def record(results: Mapping[str, Any], path: Path) -> None:
  """Adds figures, each with its versions and date, to those of a file."""
  known = json.loads(path.read_text()) if path.exists() else {}
  with files.replacing(path) as file:
    file.write(json.dumps(known | dict(results), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
  main()
