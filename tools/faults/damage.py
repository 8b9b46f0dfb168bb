"""Damages the files that a run has written and reads them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
import pickle
import shutil
from typing import Any

import jax
import numpy as np

from tools.faults.table import outcome, Row
from tpugraphs_jax.data import graph_folder
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.train import loop

KINDS = ("flipped", "cut", "emptied", "zeroed", "missing")


def damaged(data: bytes, kind: str, rng: np.random.Generator) -> bytes | None:
  """The bytes of a file after a damage of the given kind; None for a missing file."""
  if kind == "missing":
    return None
  if kind == "emptied" or not data:
    return b""
  at = int(rng.integers(len(data)))
  if kind == "cut":
    return data[:at]
  span = min(len(data) - at, 512 if kind == "zeroed" else 1)
  new = bytes(span) if kind == "zeroed" else bytes([data[at] ^ 1 << int(rng.integers(8))])
  return data[:at] + new + data[at + span :]


def _compare(read: Callable[[], Any], expected: bytes) -> None:
  if fingerprint(read()) != expected:
    raise AssertionError("another result in silence")


def fingerprint(result: Any) -> bytes:
  """Bytes that are equal for trees with equal structure and equal arrays."""
  leaves, structure = jax.tree.flatten(result)
  return pickle.dumps(
    [
      str(structure),
      *(
        (leaf.dtype.str, leaf.shape, leaf.tobytes()) if hasattr(leaf, "tobytes") else leaf
        for leaf in leaves
      ),
    ]
  )


def try_files(
  row: Row, paths: list[Path], read: Callable[[], Any], *, times: int, rng: np.random.Generator
) -> None:
  """Damages each file in every way, `times` times where it is random, and restores it each time."""
  expected = fingerprint(read())
  for path in paths:
    whole = path.read_bytes()
    for kind in KINDS:
      for _ in range(times if kind in ("flipped", "cut", "zeroed") else 1):
        data = damaged(whole, kind, rng)
        path.unlink() if data is None else path.write_bytes(data)
        row.count(outcome(lambda: _compare(read, expected)), of=f"{path.name} {kind}")
        path.write_bytes(whole)


def model_of(workdir: Path) -> Any:
  """Config, transforms and parameters in a working folder or model file, as a tree of arrays."""
  artefact = model_file.read(workdir)
  transforms = {name: value.to_dict() for name, value in artefact.transforms.items()}
  # `about` is left out: it describes the model, and scores do not depend on it.
  return artefact.config, transforms, artefact.params


def graph_of(folder: Path) -> Any:
  """The arrays of a graph in the store, as a tree."""
  graph = graph_folder.read(folder)
  configs = {name: np.asarray(value) for name, value in vars(graph.configs).items()}
  arrays = {name: value for name, value in vars(graph).items() if name != "configs"}
  return arrays, configs


def swapped(workdir: Path, source: Path, row: Row) -> None:
  """Replaces a run's files, one at a time, by those of another run of the same config.

  Args:
    workdir: working folder of a finished run, which may be damaged.
    other: working folder of a run on other data.
    row: row that counts the outcomes.
  """
  read = lambda: model_of(workdir)[1:]  # without the config: it names the data, scores ignore it
  expected = fingerprint(read())
  for name in (
    model_file.CONFIG_FILE,
    model_file.TRANSFORMS_FILE,
    model_file.MODEL_FILE,
    loop.CHECKPOINTS,
  ):
    original, kept = workdir / name, workdir / f"{name}.kept"
    original.rename(kept)
    (shutil.copytree if kept.is_dir() else shutil.copyfile)(source / name, original)
    row.count(outcome(lambda: _compare(read, expected)), of=name)
    (shutil.rmtree if kept.is_dir() else Path.unlink)(original)
    kept.rename(original)


def rows(
  workdir: Path, source: Path, graph_folder: Path, *, times: int, rng: np.random.Generator
) -> Iterator[Row]:
  """Damages the files of a finished run and of a graph in the store; yields a row for each kind.

  Args:
    workdir: working folder of a finished run, which may be damaged.
    other: working folder of a run of the same config on other data.
    graph_folder: folder of a graph in the store, which may be damaged.
    times: attempts for each file and each random kind of damage; some files get more.
    rng: draws the damages.
  """
  row = Row("damage, config and transforms")
  try_files(
    row,
    [workdir / model_file.CONFIG_FILE, workdir / model_file.TRANSFORMS_FILE],
    lambda: model_of(workdir),
    times=10 * times,
    rng=rng,
  )
  yield row
  row = Row("damage, swapped with what another run wrote")
  swapped(workdir, source, row)
  yield row
  row = Row("damage, checkpoint")
  paths = sorted(path for path in (workdir / "checkpoints").rglob("*") if path.is_file())
  try_files(row, paths, lambda: model_of(workdir), times=times, rng=rng)
  yield row
  row = Row("damage, model file")
  path = workdir / model_file.MODEL_FILE
  try_files(row, [path], lambda: model_of(path), times=50 * times, rng=rng)
  yield row
  row = Row("damage, graph of the store")
  try_files(
    row, sorted(graph_folder.iterdir()), lambda: graph_of(graph_folder), times=10 * times, rng=rng
  )
  yield row
