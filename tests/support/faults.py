"""Damages files as disks and people do, and compares what a disturbed run left with a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import json
from pathlib import Path
import struct
from typing import Any
import zipfile

import jax
import numpy as np

from tests.support import commands, run_folders

SHORT = (
  "--config.model.hidden_dim=8",
  "--config.train.epochs=2",
  "--config.train.log_every_steps=1",
  "--config.train.checkpoint_every_steps=3",
)
DAMAGES = ("flipped", "cut", "emptied", "zeroed", "missing")
_VALUES = (
  *(None, True, -1, 0, 2, 10**6, 2**62, 10**30, -2.5, 1e308, float("nan")),
  *("", "x", "\x1b[2J", "../../x", "/tmp/x", "zip://::x", "gs://x", "os", "=1+1"),
  *([], ["x"], [[[]]], {}, {"x": 1}),
)


def outcome(read: Callable[[], object], *, names: str = "") -> str:
  """`read`, `refused` in one printable line, or what went wrong.

  Args:
    read: reads a file.
    names: what a line that refuses has to name; numbers that are not finite are excepted.
  """
  try:
    read()
  except (ValueError, OSError, FloatingPointError) as error:
    said = str(error)
    if not said.isprintable():
      return f"several lines: {said!r}"
    return "refused" if names in said or isinstance(error, FloatingPointError) else f"who? {said}"
  except Exception as error:  # what a user would see as a traceback
    return f"{type(error).__name__}: {error}"
  return "read"


def damaged(data: bytes, kind: str, rng: np.random.Generator) -> bytes:
  """The bytes of a file after one of the `DAMAGES` but `missing`."""
  at = int(rng.integers(len(data)))
  if kind in ("emptied", "cut"):
    return data[: at if kind == "cut" else 0]
  span = min(len(data) - at, 512 if kind == "zeroed" else 1)
  new = bytes(span) if kind == "zeroed" else bytes([data[at] ^ 1 << int(rng.integers(8))])
  return data[:at] + new + data[at + span :]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
  """Data after one random change of bytes, a span, an 8-byte integer or the end."""
  data, kind = bytearray(data), rng.integers(6)
  at, span = int(rng.integers(len(data) + 1)), int(rng.integers(1, 40))
  if kind == 0:
    for place in rng.integers(len(data), size=rng.integers(1, 4)):
      data[place] = rng.integers(256)
  elif kind == 1:
    data[at : at + span] = rng.bytes(len(data[at : at + span]))
  elif kind == 2:
    del data[at : at + span]
  elif kind == 3:
    data[at:at] = data[at : at + span] * int(rng.integers(1, 4))
  elif kind == 4:
    data[at : at + 8] = struct.pack("<q", int(rng.choice([-1, 2**31, 2**62, 10**11])))
  else:
    del data[at:]
  return bytes(data)


def write_mutated(source: Path, target: Path, rng: np.random.Generator) -> None:
  """Writes a mutated copy; of an archive every second one has a right checksum."""
  if not zipfile.is_zipfile(source) or rng.integers(2):
    target.write_bytes(mutated(source.read_bytes(), rng))
    return
  with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
    chosen = rng.integers(len(archive.namelist()))
    for number, name in enumerate(archive.namelist()):
      data = archive.read(name)
      if number == chosen:  # mostly in the header, which holds the size of the array
        data = mutated(data[:128], rng) + data[128:] if rng.random() < 0.7 else mutated(data, rng)
      copy.writestr(name, data)


def changed(value: Any, rng: np.random.Generator) -> Any:
  """A JSON value of which one part, anywhere in it, is another, missing, renamed or there twice."""
  value = json.loads(json.dumps(value))
  places = list(_places(value))
  *way, last = places[rng.integers(len(places))]
  parent = value
  for key in way:
    parent = parent[key]
  kind = rng.integers(5)
  if kind == 0:
    del parent[last]
  elif kind == 1 and isinstance(parent, list):
    parent.append(parent[last])
  elif kind == 2 and isinstance(parent, dict):
    parent[f"{last}x"] = parent.pop(last)
  elif kind == 3 and isinstance(parent[last], (int, float)):
    parent[last] = -parent[last] - 1
  else:
    parent[last] = _VALUES[rng.integers(len(_VALUES))]
  return value


def _places(value: Any, way: tuple = ()) -> Iterator[tuple]:
  """The ways to every part of a JSON value, each as likely however large its siblings are."""
  items = value.items() if isinstance(value, dict) else enumerate(value)
  for key, part in items:
    yield (*way, key)
    if isinstance(part, (dict, list)) and part:
      yield from list(_places(part, (*way, key)))[:50]


def changed_arrays(arrays: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
  """Arrays of which one has another shape, type or content, is missing, or has another name."""
  arrays, name = dict(arrays), list(arrays)[rng.integers(len(arrays))]
  array, kind = arrays.pop(name), rng.integers(9)
  others = (
    lambda: array[:-1] if array.ndim else array[None],
    lambda: array[None],
    lambda: array.astype("U3"),
    lambda: array.astype(bool),
    lambda: np.zeros(0, array.dtype),
    lambda: np.full(array.shape, -1),
    lambda: np.full(array.shape, np.nan),
  )
  if kind < len(others):
    arrays[name] = others[kind]()
  elif kind == len(others):
    arrays["../" * 3 + name] = array
  return arrays


def all_files(folder: Path) -> dict[str, bytes]:
  """The files in a folder and below it, by name."""
  return {
    str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
  }


def contents(workdir: Path) -> dict[str, object]:
  """Files, metrics and last parameters of a run that must not depend on faults, by name."""
  names = ("features.json", "validation.csv", "results.csv", "model.npz")
  result: dict[str, object] = {
    name: (workdir / name).read_bytes() for name in names if (workdir / name).exists()
  }
  for path in sorted(workdir.rglob("metrics.jsonl")):
    result[str(path.relative_to(workdir))] = run_folders.metrics(path.parent)
  newest = run_folders.newest_checkpoint(workdir)
  arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(newest.params)]
  return result | {"checkpoint": (newest.step, arrays)}


def assert_whole(workdir: Path, expected: Mapping[str, object]) -> None:
  """Asserts that a finished run has the `contents` of an undisturbed one, and no leftovers."""
  left = [
    path
    for path in workdir.rglob("*")
    if path.name.endswith(".partial") or "orbax-checkpoint-tmp" in path.name
  ]
  assert not left
  for folder in workdir.rglob("checkpoints"):
    assert len(list(folder.iterdir())) <= 2
  found = contents(workdir)
  assert [
    name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
  ] == []


def run(arguments: list[Any], home: Path, **options: Any) -> commands.Ended:
  """Runs a command, see `commands.Run`."""
  home.mkdir(exist_ok=True)
  (ended,) = commands.run_all([commands.Run(arguments, **options)], home=home)
  return ended
