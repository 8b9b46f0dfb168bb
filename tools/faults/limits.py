"""Trains on data with extreme or missing numbers, and with settings that make numbers overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
import re
import shutil
from typing import Any

import jax
import numpy as np

from tests.support import commands, run_folders
from tools.faults.kills import SMALL
from tools.faults.table import Row
from tpugraphs_jax.rankers import model_file

_LIMIT = np.iinfo(np.int64).max
_TILE = ("run_tile.py", "configs/tile.py:ci", "tile/xla")
_LAYOUT = ("run_layout.py", "configs/layout.py:xla-random,full,ci", "layout/xla/random")
_SEGMENTS = ("run_layout.py", "configs/layout.py:xla-random,gst_ed,ci", "layout/xla/random")
TASKS = {"tile": _TILE, "layout": _LAYOUT, "segments": _SEGMENTS}

# A function that changes the arrays of a file, given the file's number and split.
Change = Callable[[dict[str, np.ndarray], int, str], None]


def _near_the_limit(arrays, number, split):
  arrays["config_runtime"] = _LIMIT - np.argsort(np.argsort(arrays["config_runtime"]))


def _from_one_to_the_limit(arrays, number, split):
  runtimes = arrays["config_runtime"]
  runtimes[:] = np.geomspace(1, 9e18, len(runtimes)).astype(np.int64)


def _missing_in_every_second_file(arrays, number, split):
  if number % 2:
    arrays["config_runtime"][:] = 0


def _set(name: str, place: Any, value: float, *, of: str = "") -> Change:
  """Sets a part of an array, in the files of one split or of all."""

  def change(arrays, number, split):
    if of in ("", split):
      arrays[name][place] = value

  return change


def _features_near_the_limit(arrays, number, split):
  arrays["node_feat"][:, ::3] *= np.float32(1e30)


def _unchanged(arrays, number, split):
  pass


_RAW = ("--config.data.feature_transform=none",)
_BFLOAT16 = ("--config.model.dtype=bfloat16",)
_larger_in_validation = _set("node_feat", np.s_[:, 21:60], 3e38, of="valid")
# Change of every file, further flags and right outcome (None: both are right), by name.
CASES: dict[str, tuple[Change, tuple[str, ...], str | None]] = {
  "runtimes near the limit of int64": (_near_the_limit, (), None),
  "the same, as ratios": (_near_the_limit, ("--config.batch.target=ratio",), None),
  "the same, as ranks": (_near_the_limit, ("--config.batch.target=rank",), "survived"),
  "runtimes from 1 to the limit": (_from_one_to_the_limit, (), None),
  "the same, ratios": (_from_one_to_the_limit, ("--config.batch.target=ratio",), None),
  "all runtimes equal": (_set("config_runtime", np.s_[:], 7), (), None),
  "no runtimes within a file": (_set("config_runtime", np.s_[::2], 0), (), "refused"),
  "no runtimes in some files": (_missing_in_every_second_file, (), "survived"),
  "no runtimes to train on": (_set("config_runtime", np.s_[:], 0, of="train"), (), "refused"),
  "no runtimes to judge by": (_set("config_runtime", np.s_[:], 0, of="valid"), (), "refused"),
  "a negative runtime": (_set("config_runtime", 0, -1), (), "refused"),
  "features near the limit": (_features_near_the_limit, (), None),
  "the same, raw": (_features_near_the_limit, _RAW, None),
  "the same, raw, bfloat16": (_features_near_the_limit, (*_RAW, *_BFLOAT16), None),
  "features near the limit in validation": (_larger_in_validation, _RAW, None),
  "the same, bfloat16": (_larger_in_validation, (*_RAW, *_BFLOAT16), None),
  "features that are not finite": (_set("node_feat", (0, 5), np.nan), (), "refused"),
  **{
    f"learning rate {rate}": (
      _unchanged,
      (f"--config.optimizer.learning_rate={rate}", "--config.optimizer.clip_norm=0"),
      None,
    )
    for rate in ("1e4", "1e20", "1e38")
  },
  "learning rate 1e20, bfloat16": (
    _unchanged,
    ("--config.optimizer.learning_rate=1e20", *_BFLOAT16),
    None,
  ),
  "learning rate 1e38, at the last step": (
    _unchanged,
    (
      "--config.optimizer.learning_rate=1e38",
      "--config.train.epochs=1",
      "--config.batch.slates_per_epoch=4",
    ),
    None,
  ),
}

SHORT = (
  "the same, as ratios",
  "features near the limit in validation",
  "learning rate 1e20",
  "learning rate 1e38, at the last step",
)


def _changed(source: Path, target: Path, collection: str, change: Change) -> None:
  """Copies a collection to `target` and changes every file of the copy."""
  shutil.copytree(source / collection, target / collection)
  for number, path in enumerate(sorted((target / collection).rglob("*.npz"))):
    with np.load(path) as file:
      arrays = {name: file[name].copy() for name in file.files}
    change(arrays, number, path.parent.name)
    np.savez(path, **arrays)


def _outcome(ended: commands.Ended, workdir: Path, expected: str | None) -> str:
  said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
  if "Traceback" in ended.err or (ended.code and len(said) != 1):
    return f"no single line: {ended.err[-800:]}"
  if not_finite := _not_finite(workdir):
    return f"not finite: {not_finite}; {said}"
  if ended.code and "finite" in said[0] and not re.search(r"step \d|file|value|node_feat", said[0]):
    return f"does not say where: {said[0]}"
  result = "refused" if ended.code else "survived"
  return result if expected in (None, result) else f"{result}, expected {expected}: {said}"


def _not_finite(workdir: Path) -> list[str]:
  """Names of parameters and files of a run that have values which are not finite."""
  if not (workdir / "checkpoints").is_dir():
    return []
  checkpoint = run_folders.newest_checkpoint(workdir)
  trees = {} if checkpoint is None else {"newest checkpoint": checkpoint.params}
  if (workdir / "model.npz").exists():
    trees["model file"] = model_file.read(workdir / "model.npz").params
  names = [
    f"{name}, {jax.tree_util.keystr(path)}"
    for name, tree in trees.items()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if not np.isfinite(np.asarray(leaf, np.float32)).all()
  ]
  csv = workdir / "validation.csv"
  return names + ["inf in validation.csv"] * (csv.exists() and "inf" in csv.read_text())


def rows(
  folder: Path, data_root: Path, *, home: Path, tasks=tuple(TASKS), cases=tuple(CASES)
) -> Iterator[Row]:
  """Runs every task on every case; yields a row for each task.

  Args:
    folder: folder for data and working folders.
    data_root: tiny synthetic data with a tile and a layout collection.
    home: see `commands.run_all`.
    tasks: keys of `TASKS`.
    cases: keys of `CASES`.
  """
  for task in tasks:
    row, runs = Row(f"numbers, {task}"), []
    script, config, collection = TASKS[task]
    for number, case in enumerate(cases):
      change, flags, _ = CASES[case]
      root, workdir = folder / f"{task}_data_{number}", folder / f"{task}_{number}"
      _changed(data_root, root, collection, change)
      if script == "run_layout.py":
        flags = (*flags, f"--config.data.store_dir={workdir / 'store'}")
      runs.append(
        commands.Run(
          [
            script,
            f"--config={config}",
            *SMALL,
            *flags,
            f"--data_root={root}",
            f"--workdir={workdir}",
          ]
        )
      )
    for number, (case, ended) in enumerate(zip(cases, commands.run_all(runs, home=home))):
      row.count(_outcome(ended, folder / f"{task}_{number}", CASES[case][2]), of=case)
    yield row
