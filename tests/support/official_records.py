"""Records of the official data pipeline and training, and the data roots that they were made from.

The records lie in `pipeline/` beside the released files (see `recorded`), or in the folder that
`TPUGRAPHS_PIPELINE_DIR` names. There are two kinds, for tiles and for layouts:

- inputs: `<split>/...`, the arrays of every graph after the official normalisation;
- runs: weights `w<step>_<number>` in the order of Keras, the slates of each step with its loss,
  and slates of validation graphs with their scores.

A run has the released files, and copies of them under other names; or, where it has
`made/<split>/<name>`, graphs alone that have some of the configurations of a released file.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import json
import os
from pathlib import Path
import re
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support import recorded
from tpugraphs_jax.data import npz
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.graph import SPLITS

FOLDER = Path(os.environ.get("TPUGRAPHS_PIPELINE_DIR") or recorded.ROOT / "pipeline")
_CONFIGS = {"tile": 10, "layout": 16}  # of a slate, by default


class Slate(NamedTuple):
  """A graph and the configurations of it that the official code drew."""

  name: str
  config_ids: np.ndarray  # [C] int64
  labels: np.ndarray  # [C] float32, or float64 for tiles
  block: tuple[int, int] | None = None  # of nodes, for layouts


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """One file."""

  path: Path

  @functools.cached_property
  def arrays(self) -> dict[str, np.ndarray]:
    with np.load(self.path) as file:
      return {name: file[name] for name in file.files}

  def __getitem__(self, name: str) -> np.ndarray:
    return self.arrays[name]

  @functools.cached_property
  def meta(self) -> dict[str, Any]:
    return json.loads(str(self["meta"]))

  @property
  def is_inputs(self) -> bool:
    return "train/names" in self.arrays

  @property
  def is_run(self) -> bool:
    return "loss" in self.arrays

  @functools.cached_property
  def collection(self) -> str:
    """Such as `layout:xla:default`."""
    found = re.search(r"(tile|layout)/(\w+)(?:/(\w+))?", self.meta["data"])
    return ":".join(filter(None, found.groups()))

  @property
  def kind(self) -> str:
    return Collection(self.collection).kind

  @functools.cached_property
  def flags(self) -> dict[str, Any]:
    """Flags of the official trainer; numbers where a text begins with one."""
    given = self.meta["flags"]
    if isinstance(given, str):
      given = dict(re.findall(r"(\w+) (-?\d+)", given))
    number = lambda value: re.match(r"-?\d+\b", str(value))
    return {
      name: int(number(value)[0]) if number(value) else value for name, value in given.items()
    }

  def changes(self) -> dict[str, Any]:
    """The config fields that these flags change."""
    flags, fields = (
      self.flags,
      {"batch.graphs": "batch", "batch.keep_nodes": "keep_nodes", "loss.losses": "losses"},
    )
    found = {field: flags[flag] for field, flag in fields.items() if flag in flags}
    configs = flags.get("configs", _CONFIGS[self.kind])
    found |= {"batch.configs": configs, "batch.min_configs": configs}
    if "optimizer" in self.meta:
      found["optimizer.learning_rate"] = self.meta["optimizer"]["learning_rate"]
      found["optimizer.clip_norm_per_variable"] = self.meta["optimizer"]["clipnorm"]
    options = json.loads(flags.get("model_kwargs_json") or "{}")
    return found | {f"model.{name}": value for name, value in options.items()}

  @property
  def variant(self) -> str:
    """The official variant of the config of its kind."""
    if self.kind == "tile":
      return self.flags.get("model", "EarlyJoinSAGE")
    return "-".join(self.collection.split(":")[1:]) + ",official"

  # Of runs.

  def weights(self, step: int) -> list[np.ndarray]:
    names = sorted(name for name in self.arrays if name.startswith(f"w{step}_"))
    return [self[name] for name in names]

  @property
  def weight_steps(self) -> list[int]:
    """The steps after which weights were recorded, the start among them."""
    found = {int(match[1]) for name in self.arrays if (match := re.match(r"w(\d+)_", name))}
    return sorted(found)

  @property
  def steps(self) -> list[list[Slate]]:
    """The slates of every step."""
    if self.kind == "tile":
      return [
        [Slate(str(name), *rest) for name, *rest in zip(*step)]
        for step in zip(self["step_names"], self["step_ids"], self["step_labels"], strict=True)
      ]
    columns = (self[f"slate_{name}"] for name in ("names", "ids", "labels", "blocks"))
    slates = [
      Slate(str(name), ids, labels, tuple(block.tolist()))
      for name, ids, labels, block in zip(*columns, strict=True)
    ]
    ends = np.cumsum(self["step_sizes"]).tolist()
    return [slates[start:end] for start, end in zip([0, *ends], ends)]

  @property
  def valid(self) -> list[Slate]:
    """The slates of the last validation."""
    columns = (self[f"valid_{name}"] for name in ("names", "ids", "labels"))
    return [Slate(str(name), *rest) for name, *rest in zip(*columns, strict=True)]

  # The data.

  def raw(self, split: str, name: str) -> Path:
    """The released file that a graph is, or is made from; skips the test where it is missing."""
    folder = Collection(self.collection).folder(recorded.NPZ, split)
    source = self.meta.get("sources", {}).get(f"{split}/{name}")
    if source:
      split, _, name = source.rpartition("/")
      folder = folder.with_name(split)
    path = folder / f"{name}.npz"
    if not path.exists():  # a copy: copy0_kernel_03 is alexnet_kernel_03
      same = sorted(folder.glob(f"*{re.search('(_kernel_.*)?$', name)[0] or name}.npz"))
      path = same[0] if len(same) == 1 else path
    if not path.exists():
      pytest.skip(f"{self.path.name} is made from {path}, which is missing")
    return path

  def data_root(self, folder: Path) -> Path:
    """A folder with the data of this record, made in `folder` unless it is the released one."""
    if self.flags.get("max_configs", -1) > 0:
      pytest.skip("with max_configs the official code keeps random configurations")
    if not self.is_run:
      for split, name in self._graphs():
        self.raw(split, name)
      return recorded.NPZ
    made = any(name.startswith("made/") for name in self.arrays)
    for split in SPLITS:
      target = Collection(self.collection).folder(folder, split)
      target.mkdir(parents=True)
      for path in (
        () if made else Collection(self.collection).folder(recorded.NPZ, split).glob("*.npz")
      ):
        shutil.copy(path, target)
    for split, name in set(self._graphs()):
      source = self.raw(split, name)
      target = Collection(self.collection).folder(folder, split) / f"{name}.npz"
      if f"made/{split}/{name}" in self.arrays:
        self._make(source, target, self[f"made/{split}/{name}"])
      elif not target.exists():
        shutil.copy(source, target)
    return folder

  def _graphs(self) -> Iterator[tuple[str, str]]:
    """Split and name of every graph that the record names."""
    for key, value in self.arrays.items():
      if key.startswith("made/"):
        yield tuple(key.split("/")[1:])
      elif key.endswith("/names"):
        yield from ((key.split("/")[0], str(name)) for name in value)
    if self.is_run:
      yield from (("train", slate.name) for step in self.steps for slate in step)
      yield from (("valid", slate.name) for slate in self.valid)

  def _make(self, source: Path, target: Path, config_ids: np.ndarray) -> None:
    is_tile = self.kind == "tile"
    graph = _read(source, is_tile)
    graph = dataclasses.replace(graph, configs=graph.configs.subset(config_ids))
    (npz.write_tile if is_tile else npz.write_layout)(target, graph)


@functools.lru_cache(maxsize=2)
def _read(path: Path, is_tile: bool) -> Any:
  return (npz.read_tile if is_tile else npz.read_layout)(path)


RECORDS = [Record(path) for path in sorted(FOLDER.glob("*.npz"))]
