"""Writes synthetic collections: one file at a time, and whole ones by several processes."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import json
import os
from pathlib import Path

import numpy as np
import tqdm

from tpugraphs_jax import collections, console, files, graph, jobs
from tpugraphs_jax.data import npz, npz_archive
from tpugraphs_jax.data.synthetic import layout_choices, scales, tiles

_STAMP = "synthetic.json"
NOISE_SD = 3.6e-4  # of the log of repeated measurements, median over graphs
_NOISE_RANGE = (2e-4, 2e-3)


def generate(
    out: str | os.PathLike[str], *, scale: str = "tiny", seed: int = 0,
    collections: Iterable[str] = collections.RELEASED, defects: bool = False,
    limit: int | None = None, workers: int | None = None, progress: bool = True,
) -> Path:
  """Writes synthetic collections in the released form below `<out>/npz`.

  Noise-free runtimes go below `<out>/ceiling`. Files that are there already are
  kept, so that an interrupted run goes on where it stopped.

  Args:
    out: the folder to write into.
    scale: `tiny`, `medium` or `full`.
    seed: every file follows from (scale, seed, collection, split, index).
    collections: which of the five.
    defects: with the defects of the released data.
    limit: files per split; all of them if not given.
    workers: processes; one per processor if not given, one at scale `tiny`.
    progress: shows a bar.

  Returns:
    The data root, `<out>/npz`.

  Raises:
    ValueError: unknown scale or collection, or `out` holds other data.
  """
  out = Path(out).expanduser()
  specs = [spec for collection in collections
           for spec in scales.file_specs(scale, seed, collection, limit=limit)]
  _stamp(out, {"scale": scale, "seed": seed, "defects": defects})
  write = functools.partial(write_file, out, with_defects=defects)
  if workers is None:
    workers = 1 if scale == "tiny" else os.cpu_count() or 1
  with tqdm.tqdm(
      total=len(specs), unit="file", mininterval=1, disable=console.bar(progress)) as bar:
    jobs.run(write, specs, processes=workers, finished=lambda _: bar.update())
  return out / "npz"


def _stamp(out: Path, settings: dict) -> None:
  """Notes what a folder holds, and refuses to mix it with other data."""
  path = out / _STAMP
  if path.exists():
    found = json.loads(path.read_text())
    if found != settings:
      raise ValueError(f"{out} holds synthetic data of {found}, asked for is {settings}; "
                       "choose another folder or delete this one")
    return
  if (out / "npz").exists():
    raise ValueError(f"{out / 'npz'} exists and is not known to be synthetic data; "
                     "choose another folder")
  with files.replacing(path) as file:
    json.dump(settings, file)


@dataclasses.dataclass(frozen=True)
class Ceiling:
  """What the model says and what was measured, for one file."""

  runtime_ns: np.ndarray  # [C] float64 ns without noise
  measured_ns: np.ndarray  # [C] int64 ns: the labels, also those a test file lacks


def make_file(spec: scales.FileSpec, *, with_defects: bool) -> tuple[graph.OpGraph, Ceiling]:
  """One graph with its configurations, and its noise-free runtimes."""
  return (_make_tile if spec.is_tile else _make_layout)(spec, with_defects)


def write_file(out: Path, spec: scales.FileSpec, *, with_defects: bool) -> None:
  """Writes the side file and then the file; does nothing if the file is there."""
  parts = (*spec.collection.split(":"), spec.split, f"{spec.name()}.npz")
  path = out.joinpath("npz", *parts)
  if path.exists():
    return
  op_graph, ceiling = make_file(spec, with_defects=with_defects)
  with npz_archive.create_archive(
      out.joinpath("ceiling", *parts), compress_level=6) as archive:
    for name, array in dataclasses.asdict(ceiling).items():
      npz_archive.add_array(archive, name, array.shape, array.dtype, [array])
  write = npz.write_tile if spec.is_tile else npz.write_layout
  write(path, op_graph)
  if op_graph.num_edges == 1:
    _flag_fortran_order(path, "edge_index")


def _flag_fortran_order(path: Path, name: str) -> None:
  """Rewrites a file with one array in Fortran order, as released files have small ones."""
  with np.load(path) as members:
    arrays = dict(members)
  with npz_archive.create_archive(path, compress_level=6) as archive:
    for key, array in arrays.items():
      order = "F" if key == name else "C"
      header = {"descr": np.lib.format.dtype_to_descr(array.dtype),
                "fortran_order": order == "F", "shape": array.shape}
      with archive.open(f"{key}.npy", "w") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(array.tobytes(order))


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
    npz_archive.NpzError: it is damaged.
  """
  path = Path(data_root).expanduser().parent.joinpath(
      "ceiling", *collection.split(":"), split, f"{name}.npz")
  with npz_archive.NpzArchive(path) as archive:
    return Ceiling(archive.read("runtime_ns"), archive.read("measured_ns"))


def _measure(runtime_ns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Runtimes with multiplicative noise whose size differs from graph to graph."""
  sd = np.clip(NOISE_SD * np.exp(0.5 * rng.standard_normal()), *_NOISE_RANGE)
  noisy = runtime_ns * np.exp(sd * rng.standard_normal(len(runtime_ns)))
  return np.maximum(1, np.rint(noisy)).astype(np.int64)


def _make_tile(spec: scales.FileSpec, with_defects: bool) -> tuple[graph.OpGraph, Ceiling]:
  del with_defects  # the released kernels have no others than their sizes
  size, rng = scales.tile_size(spec), spec.rng("graph")
  kernel = tiles.random_kernel(rng, nodes=size.nodes, configs=size.configs)
  config_feat, runtime_ns = tiles.tile_configs(kernel, rng, configs=size.configs, tiled=size.tiled)
  measured_ns = _measure(runtime_ns, rng)
  normalizer_ns = _measure(np.full(len(runtime_ns), runtime_ns[0]), rng)
  shown = int(spec.is_labelled)
  configs = graph.TileConfigs(
      config_feat, shown * measured_ns, normalizer_ns if shown else 0 * measured_ns + 1)
  op_graph = dataclasses.replace(kernel.program.graph(spec.name()), configs=configs)
  return op_graph, Ceiling(runtime_ns, measured_ns)


def _make_layout(spec: scales.FileSpec, with_defects: bool) -> tuple[graph.OpGraph, Ceiling]:
  origin = scales.graph_origin(spec) if with_defects else spec
  size, rng = scales.layout_size(origin), origin.rng("graph")
  program = size.program.build(rng)
  groups = layout_choices.find_groups(program, rng)
  cost = layout_choices.layout_cost(program, groups.by_node(), steps=size.steps)
  start = layout_choices.default_bits(cost, rng)
  options = _search(spec, len(program), groups, cost, start, with_defects)
  runtime_ns = cost(layout_choices.output_bits(options))
  rng = spec.rng("noise")
  measured_ns = _measure(runtime_ns, rng)
  if with_defects:
    measured_ns = scales.shuffle_measured(spec, measured_ns, rng)
  rows = np.take_along_axis(groups.options.T, options, axis=0)
  configs = graph.LayoutConfigs(
      rows=groups.rows, node_group=groups.node_group,
      group_row=rows.astype(np.uint8 if len(groups.rows) <= 256 else np.uint16),
      runtime_ns=measured_ns if spec.is_labelled else 0 * measured_ns)
  op_graph = program.graph(spec.name(), groups.config_node)
  return dataclasses.replace(op_graph, configs=configs), Ceiling(runtime_ns, measured_ns)


def _search(spec, nodes: int, groups, cost, start, with_defects: bool) -> np.ndarray:
  """The options of every configuration, `[C, groups]` uint8."""
  rng = spec.rng("search")
  configs = scales.layout_configs(spec, nodes)
  if with_defects:
    configs = scales.defective_configs(spec, configs)
    if scales.has_identical_configs(spec):
      return layout_choices.default_options(groups, start, configs)
  if spec.collection.endswith("random"):
    return layout_choices.random_search(groups, start, configs, rng)
  return layout_choices.default_search(groups, cost, start, configs, rng)
