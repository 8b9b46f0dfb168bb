"""Synthetic collections in the released form, with runtimes from a machine model.

`generate` writes any of the five collections; `read_ceiling` gives the
noise-free runtimes of one file, against which every score can be set.

The machine (`program`) has a vector unit, a matrix unit and a memory, and
keeps tensors in registers of 8 x 128 elements. From it follow two answers:

* A fused kernel (`tiles`) is computed tile by tile. Each tile
  costs a start, the larger of its arithmetic and its memory traffic, and what
  does not fit on chip. A tile needs the axes that it does not cut in full:
  whatever feeds a reduction or one operand of a product is computed anew for
  every tile along the axes it lacks. So the best tile depends on how
  instructions are connected, not only on which ones a kernel has.
* In a whole program (`networks`, `layouts`) each convolution, dot and
  reshape has its output in one of two orders. An order costs the padding of its
  two minor dimensions, in arithmetic and traffic of the instruction and of all
  elementwise ones that take it over, and a copy wherever two orders meet. So the
  best order depends on an instruction's shape and on its neighbours' orders.

Configurations are proposed as the released searches did. Measurements carry
multiplicative noise of the size seen in the released data. A file is named by
(scale, seed, collection, split, index) and everything about it follows from that, so that any
file can be made alone and in any order. The two searches of a layout source share their graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import hashlib
import math
import os
from pathlib import Path
from typing import NamedTuple
import zlib

import numpy as np

from tpugraphs_jax import datasets, graph
from tpugraphs_jax.data import npz
from tpugraphs_jax.datasets import Collection, STAMP
from tpugraphs_jax.infra import console, files, tasks, trust
from tpugraphs_jax.synthetic import layouts, tiles
from tpugraphs_jax.synthetic.networks import ImageProgram, TextProgram

SCALES = ("tiny", "medium")
NOISE_SD = 3.6e-4  # of the log of repeated measurements, median over graphs
_NOISE_RANGE = (2e-4, 2e-3)
# Files in train, valid and test.
_COUNTS = {
  "tile": {"tiny": (12, 4, 4), "medium": (800, 100, 100)},
  "layout": {"tiny": (4, 2, 2), "medium": (40, 8, 8)},
}
# Lengths that fill the lanes badly, so that instructions differ in the order they prefer.
_SEQUENCES = (48, 64, 96, 160, 192, 320)
_TRAIN_PROGRAMS = (
  "alexnet densenet inception mobilenet nasnet resnet retinanet ssd bert gpt lstm transformer unet "
  "wavenet xception"
).split()
_OTHER_PROGRAMS = "efficientnet mask_rcnn squeezenet t5 vgg vit".split()


@dataclasses.dataclass(frozen=True)
class FileSpec:
  """One file of a synthetic collection."""

  scale: str
  seed: int
  collection: str
  split: str
  index: int

  @property
  def is_tile(self) -> bool:
    return self.collection.startswith("tile")

  @property
  def is_labelled(self) -> bool:
    return self.split != "test"

  def rng(self, purpose: str) -> np.random.Generator:
    """The generator for one purpose; the one for "graph" is shared by both searches."""
    source = self.collection.rpartition(":")[0]
    owner = source if purpose == "graph" and not self.is_tile else self.collection
    tag = zlib.crc32("/".join((self.scale, owner, self.split, purpose)).encode())
    return np.random.default_rng([self.seed, tag, self.index])

  def name(self) -> str:
    """The file's stem: program and hash for tiles, 32 hex digits in a test split."""
    number = self.rng("name").integers(-(2**63), 2**63)
    if not self.is_labelled:
      return hashlib.md5(f"{self}".encode()).hexdigest()
    if not self.is_tile:
      source = self.collection.split(":")[1]
      return f"{'image' if source == 'xla' else 'text'}_{self.split}_{self.index:03d}"
    programs = _TRAIN_PROGRAMS if self.split == "train" else _OTHER_PROGRAMS
    return f"{programs[self.index % len(programs)]}_{number:x}"


class TileSize(NamedTuple):
  """The size of a tile file."""

  nodes: int
  configs: int
  tiled: bool  # False: a kernel without a tile choice


def file_specs(
  scale: str, seed: int, collection: str, *, limit: int | None = None
) -> list[FileSpec]:
  """The files of a collection, at most `limit` per split.

  Raises:
    ValueError: no such scale or collection exists.
  """
  if scale not in SCALES:
    raise ValueError(f"unknown scale {scale!r}, expected one of {', '.join(SCALES)}")
  datasets.check_released(collection)
  counts = _COUNTS[collection.partition(":")[0]]
  return [
    FileSpec(scale, seed, collection, split, index)
    for split, count in zip(graph.SPLITS, counts[scale])
    for index in range(count if limit is None else min(count, limit))
  ]


def tile_size(spec: FileSpec) -> TileSize:
  """Nodes and configurations of a tile file."""
  rng = spec.rng("size")
  if spec.scale == "tiny":
    # The smallest graph, a kernel without a choice and an odd number come first.
    first = {0: TileSize(2, 2, True), 1: TileSize(6, 8, False), 2: TileSize(12, 31, True)}
    random_size = TileSize(int(rng.integers(6, 21)), int(rng.integers(12, 49)), True)
    return first.get(spec.index, random_size) if spec.split == "train" else random_size
  tiled = rng.random() >= 0.017
  few = rng.random() < 0.015
  configs = int(np.clip(np.exp(rng.normal(5.7, 0.9)), 10, 2000))
  nodes = int(np.clip(np.exp(rng.normal(3.4, 0.75)), 2, 394))
  return TileSize(nodes, int(rng.integers(2, 10)) if few else configs, tiled)


def layout_program(spec: FileSpec) -> tuple[ImageProgram | TextProgram, int]:
  """Program of a layout file, and how often one measurement runs it; the same for both searches."""
  source = spec.collection.split(":")[1]
  rng = spec.rng("graph")
  program = (_image_program if source == "xla" else _text_program)(spec, rng)
  steps = int(np.exp(rng.uniform(0, math.log(300))))
  if spec.scale == "tiny" and source == "xla" and spec.index == 0:
    steps = 100_000  # a runtime beyond 32 bits
  return program, steps


def _image_program(spec: FileSpec, rng: np.random.Generator) -> ImageProgram:
  training = bool(rng.random() < 0.7)
  low, high = (150, 300) if spec.scale == "tiny" else (300, 3000)
  nodes = int(np.exp(rng.uniform(math.log(low), math.log(high))))
  # Of every fourth tiny program: more elements than 31 bits count.
  is_large = spec.scale == "tiny" and spec.index % 4 == 1
  unused = (45_000, 65_536) if is_large else (1000, 256)
  blocks = max(2, (nodes - 100) // (60 if training else 30))
  return ImageProgram(nodes, blocks, training, unused)


def _text_program(spec: FileSpec, rng: np.random.Generator) -> TextProgram:
  training = bool(rng.random() < 0.5)
  rng.choice(3)  # not used: data of a seed stay as they are
  sequence = int(rng.choice(_SEQUENCES))
  heads, depth = int(rng.choice((2, 3, 4, 6, 8))), int(rng.choice((16, 32, 64, 128)))
  batch = int(rng.choice((2, 4, 8, 16)))
  training = training and spec.scale == "medium"
  layers = 1 if spec.scale == "tiny" else int(rng.integers(2, 8))
  least = 120 + 320 * layers if training else 60 + 85 * layers
  nodes = int(least * rng.uniform(1.0, 1.3))
  return TextProgram(nodes, layers, training, batch, sequence, heads * depth, heads)


def layout_configs(spec: FileSpec) -> int:
  """Configurations of a layout file: of tiny test files 32 and 33, else a multiple of 8."""
  rng = spec.rng("configs")
  if spec.scale == "tiny":
    return (32 + spec.index) if spec.split == "test" else int(8 * rng.integers(8, 17))
  return int(8 * round(np.exp(rng.uniform(math.log(400), math.log(4000))) / 8))


def generate(
  out: str | os.PathLike[str],
  *,
  scale: str = "tiny",
  seed: int = 0,
  collections: Iterable[str] = datasets.RELEASED,
  limit: int | None = None,
  workers: int | None = None,
  progress: bool = True,
) -> Path:
  """Writes synthetic collections in the released form below `<out>/npz`.

  Noise-free runtimes go below `<out>/ceiling`. Files that are there already are
  kept, so that an interrupted run goes on where it stopped.

  Args:
    out: the folder to write into.
    scale: `tiny` or `medium`.
    seed: every file follows from (scale, seed, collection, split, index).
    collections: which of the five.
    limit: files per split; all of them if not given.
    workers: processes; one per processor if not given, one at scale `tiny`.
    progress: shows a bar.

  Returns:
    The data root, `<out>/npz`.

  Raises:
    ValueError: unknown scale or collection, or `out` holds other data.
  """
  out = files.expanded(out)
  names = list(collections)
  specs = [spec for name in names for spec in file_specs(scale, seed, name, limit=limit)]
  _stamp(out, names, {"scale": scale, "seed": seed})
  write = functools.partial(write_file, out)
  if workers is None:
    workers = 1 if scale == "tiny" else os.cpu_count() or 1
  with console.working("writing", total=len(specs), unit="files", is_on=progress) as work:
    tasks.run(write, specs, processes=workers, finished=lambda _: work.update())
  return out / "npz"


def _stamp(out: Path, names: Iterable[str], settings: dict) -> None:
  """Notes the settings in a folder and its collections; refuses to mix data of other settings."""
  path = out / STAMP
  if path.exists():
    advice = "choose another folder or delete this one"
    with trust.json_of(path, {}, advice) as stamp:
      is_same = stamp | settings == stamp
    if not is_same:
      raise ValueError(f"{out} holds synthetic data of {stamp}, asked for is {settings}; {advice}")
  elif (out / "npz").exists():
    raise ValueError(
      f"{out / 'npz'} exists and is not known to be synthetic data; choose another folder"
    )
  for folder in (out, *(out / "npz" / Collection(name).path for name in names)):
    files.write_json(folder / STAMP, settings)


@dataclasses.dataclass(frozen=True)
class Ceiling:
  """Runtimes of one file without and with noise."""

  runtime_ns: np.ndarray  # [C] float64 ns without noise
  measured_ns: np.ndarray  # [C] int64 ns with noise: the labels, which test files leave out


def make_file(spec: FileSpec) -> tuple[graph.OpGraph, Ceiling]:
  """One graph with its configurations, and its noise-free runtimes."""
  return (_make_tile if spec.is_tile else _make_layout)(spec)


def write_file(out: Path, spec: FileSpec) -> None:
  """Writes the side file and then the file; does nothing if the file is there."""
  parts = (*spec.collection.split(":"), spec.split, f"{spec.name()}.npz")
  path = out.joinpath("npz", *parts)
  if path.exists():
    return
  op_graph, ceiling = make_file(spec)
  with files.replacing(out.joinpath("ceiling", *parts), "wb") as file:
    np.savez_compressed(file, **dataclasses.asdict(ceiling))
  write = npz.write_tile if spec.is_tile else npz.write_layout
  write(path, op_graph)


def read_ceiling(
  data_root: str | os.PathLike[str], collection: str, split: str, name: str
) -> Ceiling:
  """Noise-free and measured runtimes of one synthetic file.

  Args:
    data_root: the folder `generate` returned; the side files lie beside it.
    collection: e.g. `tile:xla`.
    split: `train`, `valid` or `test`.
    name: the file's stem.

  Raises:
    FileNotFoundError: there is no such side file.
    npz.NpzError: it is damaged.
  """
  root = files.expanded(data_root).parent
  path = root.joinpath("ceiling", *collection.split(":"), split, f"{name}.npz")
  with npz.NpzArchive(path) as archive:
    return Ceiling(archive.read("runtime_ns"), archive.read("measured_ns"))


def _measure(runtime_ns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Runtimes with multiplicative noise whose size differs from graph to graph."""
  sd = np.clip(NOISE_SD * np.exp(0.5 * rng.standard_normal()), *_NOISE_RANGE)
  noisy = runtime_ns * np.exp(sd * rng.standard_normal(len(runtime_ns)))
  return np.maximum(1, np.rint(noisy)).astype(np.int64)


def _make_tile(spec: FileSpec) -> tuple[graph.OpGraph[graph.TileConfigs], Ceiling]:
  size, rng = tile_size(spec), spec.rng("graph")
  kernel = tiles.random_kernel(rng, nodes=size.nodes, configs=size.configs)
  config_feat, runtime_ns = tiles.tile_configs(kernel, rng, configs=size.configs, tiled=size.tiled)
  measured_ns = _measure(runtime_ns, rng)
  normalizer_ns = _measure(np.full(len(runtime_ns), runtime_ns[0]), rng)
  configs = graph.TileConfigs(config_feat, measured_ns, normalizer_ns)
  if not spec.is_labelled:
    configs = graph.TileConfigs(config_feat, 0 * measured_ns, 0 * measured_ns + 1)
  return kernel.program.graph(spec.name(), configs), Ceiling(runtime_ns, measured_ns)


def _make_layout(spec: FileSpec) -> tuple[graph.OpGraph[graph.LayoutConfigs], Ceiling]:
  (design, steps), rng = layout_program(spec), spec.rng("graph")
  program = design.build(rng)
  groups = layouts.find_groups(program, rng)
  cost = layouts.layout_cost(program, groups.by_node(), steps=steps)
  start = layouts.default_bits(cost, rng)
  configs, search = layout_configs(spec), spec.rng("search")
  if spec.collection.endswith("random"):
    options = layouts.random_search(groups, start, configs, search)
  else:
    options = layouts.default_search(groups, cost, start, configs, search)
  runtime_ns = cost(layouts.output_bits(options))
  measured_ns = _measure(runtime_ns, spec.rng("noise"))
  dtype = np.uint8 if len(groups.rows) <= 256 else np.uint16
  group_row = np.take_along_axis(groups.options.T, options, axis=0).astype(dtype)
  shown_ns = measured_ns if spec.is_labelled else 0 * measured_ns
  labelled = graph.LayoutConfigs(groups.rows, groups.node_group, group_row, shown_ns)
  op_graph = program.graph(spec.name(), labelled, groups.config_node)
  return op_graph, Ceiling(runtime_ns, measured_ns)
