"""`summary.json`: the result of a run, with all it takes to set it beside another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import datetime
import json
import math
from pathlib import Path
import signal
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from tpugraphs_jax import files, parallel
from tpugraphs_jax.collections import Collection, label_kind
from tpugraphs_jax.serve import judge
from tpugraphs_jax.train import log, loop

FILE = "summary.json"


def read(workdir: Path) -> dict[str, Any]:
  """The summary of a working folder; empty where there is none that can be read."""
  try:
    found = json.loads((workdir / FILE).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}


def update(workdir: Path, **sections: Any) -> None:
  """Replaces sections of the summary; the others stay. Only the primary process writes."""
  if not parallel.is_primary():
    return
  with files.replacing(workdir / FILE, encoding="utf-8") as file:
    json.dump(_plain(read(workdir) | sections), file, indent=2)
    file.write("\n")


def _plain(value: Any) -> Any:
  """The same for JSON, which knows no NaN."""
  if isinstance(value, Mapping):
    return {key: _plain(entry) for key, entry in value.items()}
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  return value


def begin(config: ml_collections.ConfigDict, workdir: Path, collection: str) -> None:
  """Writes what is known before training; what an earlier run left is dropped."""
  if parallel.is_primary():
    (workdir / FILE).unlink(missing_ok=True)
  device = jax.devices()[0]
  update(workdir, collection=collection, model=config.model.name, seed=config.seed,
         data_root=config.data_root,
         labels=label_kind(config.data_root, Collection(collection)), devices=f"{jax.device_count()} x {device.device_kind}",
         versions=log.versions(),
         date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"))


@contextlib.contextmanager
def interruptions(workdir: Path) -> Iterator[None]:
  """Writes why training ended where it does not end by itself."""
  started = time.monotonic()
  try:
    yield
  except SystemExit as end:
    is_signal = isinstance(end.code, int) and end.code > 128
    asked = signal.Signals(end.code - 128).name if is_signal else str(end.code)
    _cut_short(workdir, f"asked to stop ({asked})", started)
    raise
  except FloatingPointError as error:
    _cut_short(workdir, str(error).partition(";")[0], started)
    raise


def _cut_short(workdir: Path, why: str, started: float) -> None:
  update(workdir, training={"ended": why, "seconds": time.monotonic() - started})


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
  count = config.train.valid_configs
  return {
      "ended": result.why, "step": result.step, "seconds": seconds,
      "compile_seconds": result.compile_seconds,
      "peak_memory": {"of": what, "bytes": result.peak_bytes},
      "best": {
          "step": result.best_step,
          "metric": f"{loop.SAMPLE}/{judge.mean_name(config.train.best_metric)}",
          "value": result.best_value, "split": "valid", "graphs": graphs,
          "configurations": f"a seeded {count} of each graph" if count else "all"},
  }


def of_evaluation(
    means: Mapping[str, float], random: Mapping[str, float], configurations: str,
    ids: Sequence[np.ndarray], seconds: float, *, split: str,
) -> dict[str, Any]:
  """The section of an evaluation, `validation` or the name of another split.

  Args:
    means: metrics by name.
    random: the same of random orders.
    configurations: which of each graph were judged.
    ids: they, `[n]` int64 for each graph.
    seconds: wall time with loading and compilation.
    split: which one was judged.
  """
  what, peak_bytes = log.peak_memory()
  return {
      "split": split, "graphs": len(ids), "configurations": configurations,
      "configurations_judged": sum(map(len, ids)),
      "metrics": {judge.mean_name(name): value for name, value in means.items()},
      "random_order": {judge.mean_name(name): value for name, value in random.items()},
      "seconds": seconds,
      "peak_memory": {"of": what, "bytes": peak_bytes},
  }
