"""Makes files as somebody would who wants to harm their reader: valid ones with hostile values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import json
import os
from pathlib import Path
import shutil
from typing import Any
import zipfile

from absl import logging
import numpy as np

from tools.faults import damage
from tools.faults.table import outcome, Row
from tpugraphs_jax import hlo, report
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import files, trust
from tpugraphs_jax.rankers import model_file, ranker
from tpugraphs_jax.tuning import label_file

VALUES = (
  None,
  True,
  -1,
  0,
  1,
  2,
  3,
  10**6,
  2**31,
  2**62,
  10**30,
  -2.5,
  1e308,
  float("nan"),
  "",
  "x",
  "$x_{",
  "\x1b[2J",
  "../../x",
  "/tmp/x",
  "zip://::x",
  "gs://x",
  "os",
  "a@/tmp",
  "=1+1",
  [],
  [0],
  ["x"],
  [[[]]],
  {},
  {"x": 1},
  {"labels": 3},
)


def changed(value: Any, rng: np.random.Generator) -> Any:
  """A JSON value of which one part, anywhere in it, is another, missing, or there twice."""
  places = list(_places(value))
  *way, last = places[rng.integers(len(places))]
  value = json.loads(json.dumps(value))
  parent = value
  for key in way:
    parent = parent[key]
  kind = rng.integers(6)
  if kind == 0:
    del parent[last]
  elif kind == 1 and isinstance(parent, list):
    parent.append(parent[last])
  elif kind == 2 and isinstance(parent, dict):
    parent[f"{last}x"] = parent.pop(last)
  elif kind == 3 and isinstance(parent[last], (int, float)):
    parent[last] = -parent[last] - 1
  else:
    parent[last] = VALUES[rng.integers(len(VALUES))]
  return value


def _places(value: Any, way: tuple = ()) -> Iterator[tuple]:
  """The ways to every part of a JSON value, each as likely however large its siblings are."""
  items = value.items() if isinstance(value, dict) else enumerate(value)
  for key, part in items:
    yield (*way, key)
    if isinstance(part, (dict, list)) and part:
      yield from list(_places(part, (*way, key)))[:50]


def changed_arrays(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
  """Arrays of which one has another shape, type or content, is missing, or has another name."""
  arrays, name = dict(arrays), list(arrays)[rng.integers(len(arrays))]
  array, kind = arrays.pop(name), rng.integers(8)
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
  elif rng.random() < 0.5:
    arrays["../" * 3 + name] = array
  return arrays


def model_files(
  source: Path, target: Path, graph: OpGraph, *, times: int, rng: np.random.Generator
) -> Row:
  """Loads model files with right checksums and wrong content, and ranks with those that load."""
  row = Row("sent, model file")
  with np.load(source) as file:
    arrays = dict(file)
  card = json.loads(arrays.pop("card").tobytes())
  for number in range(times):
    changed_card, params = card, arrays
    if number % 3:
      changed_card = changed(card, rng)
    else:
      params = changed_arrays(arrays, rng)
    if isinstance(changed_card.get("checksum"), str):
      changed_card = changed_card | {"checksum": model_file._checksum(params)}
    text = np.frombuffer(json.dumps(changed_card).encode(), np.uint8)
    np.savez(target, card=text, **params)
    row.count(
      outcome(lambda: ranker.Ranker.load(target).rank(graph), names=target.name), of=f"{number}"
    )
  return row


def working_folders(source: Path, folder: Path, *, times: int, rng: np.random.Generator) -> Row:
  """Makes a page of working folders with a wrong file each."""
  row = Row("sent, working folder for a report")
  logging.set_verbosity("error")
  for number in range(times):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("config.json", "summary.json", "metrics.jsonl", "validation_scores.npz"):
      shutil.copyfile(source / name, folder / name)
    path = (
      folder / ("config.json", "summary.json", "metrics.jsonl", "validation_scores.npz")[number % 4]
    )
    _change(path, rng)
    row.count(
      outcome(lambda: report.write([folder], folder / "page.html"), names=path.name),
      of=f"{path.name} {number}",
    )
  return row


def _change(path: Path, rng: np.random.Generator) -> None:
  if path.suffix == ".npz":
    with np.load(path) as file:
      np.savez(path, **changed_arrays(dict(file), rng))
    return
  text = path.read_text()
  if rng.random() < 0.2:
    path.write_bytes(damage.damaged(text.encode(), "flipped", rng))
  elif path.suffix == ".json":
    values = changed(json.loads(text), rng)
    is_sealed = isinstance(values, dict) and "checksum" in values
    path.write_text(json.dumps(files.seal(values) if is_sealed else values))
  else:
    lines = text.splitlines()
    at = int(rng.integers(len(lines) - 1))  # the last one may be cut short
    lines[at] = json.dumps(changed([json.loads(lines[at])], rng)[:1] or [3])[1:-1]
    path.write_text("\n".join(lines) + "\n")


def graph_files(
  source: Path,
  folder: Path,
  read: Callable[[Path], OpGraph],
  *,
  times: int,
  rng: np.random.Generator,
) -> Row:
  """Reads graph files with a wrong array, a wrong name, or an archive of another form."""
  row = Row("sent, graph file")
  with np.load(source) as file:
    arrays = dict(file)
  for number in range(times):
    name = "=g", "g,h", "g\x1b[2J", "g:h", "g"
    path = folder / f"{name[number % len(name)]}.npz"
    np.savez(path, **changed_arrays(arrays, rng))
    with zipfile.ZipFile(path) as archive:
      members = {name: archive.read(name) for name in archive.namelist()}
    method = (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED)[number % 3]
    with zipfile.ZipFile(path, "w", method) as archive:
      for member, data in members.items():
        archive.writestr(member, data)
    result = outcome(lambda: read(path), names="npz")
    is_wrong = number % len(name) < 4 or number % 3 < 2
    row.count("read" if is_wrong and result == "survived" else result, of=f"{number}")
    path.unlink()
  return row


def label_files(folder: Path, *, times: int, rng: np.random.Generator) -> Row:
  """Flips a bit in the lines of a file of labels, which must not be taken for whole."""
  row, path = Row("sent, labels of collect"), folder / "labels.jsonl"
  key = {"label": "measured", "program": "a"}
  path.unlink(missing_ok=True)
  for number in range(20):
    label_file.append(path, {**key, "numbers": [number]})
    raw = {"seconds": [float(rng.random())]}
    label_file.append(path, {**key, "numbers": [number], "raw": raw})
  whole, lines = path.read_bytes(), label_file.records(path)
  for number in range(times):
    path.write_bytes(damage.damaged(whole, ("flipped", "cut")[number % 2], rng))
    row.count(outcome(lambda: _read_labels(path, lines), names=path.name), of=f"{number}")
  return row


def _read_labels(path: Path, lines: list[dict[str, Any]]) -> None:
  """Reads labels; refuses what is neither whole nor the beginning of what was written."""
  records = label_file.records(path)
  if records != lines[: len(records)]:
    raise AssertionError("other labels in silence")


def keys(folder: Path, *, times: int, rng: np.random.Generator) -> Row:
  """Names of files of a bucket, made of parts that lead somewhere else."""
  row = Row("sent, key of a bucket")
  parts = ("..", ".", "", "a", "~", "/", "\\", "\0", "...", "b c")
  for _ in range(times):
    key = "/".join(rng.choice(parts, rng.integers(1, 6)))
    row.count(outcome(lambda: _followed(folder, key)), of=repr(key))
  return row


def _followed(folder: Path, key: str) -> None:
  path = Path(os.path.normpath(trust.inside(folder, key)))
  if path == folder or not path.is_relative_to(folder):
    raise AssertionError(f"went to {path}")


def texts(*, times: int, rng: np.random.Generator) -> Row:
  """HLO text that nests deeply, has large numbers, or is damaged."""
  row = Row("sent, HLO text")
  for _ in range(times):
    depth, number = int(10 ** rng.uniform(0, 5.5)), int(10 ** rng.uniform(0, 18))
    text = str(
      rng.choice(
        [
          f"add({'(' * depth})",
          f"parameter({number})",
          f"parameter(0), metadata={{{'{' * depth}",
          f"constant({'{' * depth}1{'}' * depth})",
          f"iota(), iota_dimension={number}",
        ]
      )
    )
    shape = str(rng.choice(["f32[]", f"f32[{number}]", "(" * depth + "f32[]" + ")" * depth]))
    module = f"HloModule m\nENTRY e {{\n ROOT r = {shape} {text}\n}}"
    row.count(
      outcome(lambda: hlo.featurize(module), names="HLO text"),
      of=f"{shape[:20]} {text[:20]} {depth}",
    )
  return row


def rows(workdir: Path, graph_file: Path, folder: Path, *, times: int, seed: int) -> Iterator[Row]:
  """A row for each kind of file.

  Args:
    workdir: of a finished layout run.
    graph_file: of a layout collection.
    folder: to write into.
    times: files of each kind.
    seed: of the changes.
  """
  folder.mkdir(parents=True, exist_ok=True)
  graph = npz.read_layout(graph_file)
  small = graph.configs.subset(np.arange(min(8, len(graph.configs))))
  small = type(graph)(**{**vars(graph), "configs": small})
  for number, path in enumerate(
    (workdir / model_file.MODEL_FILE, *sorted(model_file.SHIPPED.glob("*.npz")))
  ):
    row = model_files(
      path, folder / "sent.npz", small, times=times, rng=np.random.default_rng([seed, 5, number])
    )
    row.fault += f" ({path.stem})" if number else ""
    yield row
  yield label_files(folder, times=100 * times, rng=np.random.default_rng([seed, 8]))
  yield keys(folder, times=100 * times, rng=np.random.default_rng([seed, 9]))
  yield texts(times=times // 5 + 2, rng=np.random.default_rng([seed, 10]))
  yield working_folders(workdir, folder / "run", times=times, rng=np.random.default_rng([seed, 6]))
  yield graph_files(
    graph_file, folder, npz.read_layout, times=5 * times, rng=np.random.default_rng([seed, 7])
  )
