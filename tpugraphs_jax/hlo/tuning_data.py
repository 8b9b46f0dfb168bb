"""The data set's tuning records, read and converted to the released `.npz` format.

`ModuleTuningData` is a whole program with layout configurations that were measured,
`TuningData` many kernels with tile sizes. Which runs count, and what a missing default
run means, differs between the two and follows the data set's extractor.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import functools
import os
from pathlib import Path
import tempfile

import numpy as np

from tpugraphs_jax import columns, graph
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import module_graph, proto, sources
from tpugraphs_jax.infra import console, files, tasks

_TENSORS = 3  # output, input, kernel
_INT64 = 1 << 64


@dataclasses.dataclass(frozen=True)
class TuningGraphs:
  """The graphs of one file with their configurations, and the modules that were left out."""

  graphs: list[module_graph.HloGraph]
  skipped: list[str]  # one line for each module without a graph, with the reason


def read_tuning(path: str | os.PathLike[str]) -> TuningGraphs:
  """Reads a `.pb` of the data set: one layout graph, or the tile graphs of a file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file holds something else, or a record is inconsistent.
  """
  loaded = sources.load_file(path)
  message = proto.parse_any(loaded.data, where=loaded.where)
  if isinstance(message, proto.TuningData):
    return tile_graphs(message, where=loaded.where, name=loaded.name)
  if isinstance(message, proto.HloModuleProto):
    raise ValueError(
      f"{loaded.where}: an HLO module without runs, expected tuning data; "
      "read it with tpugraphs_jax.hlo.featurize"
    )
  layout = layout_graph(message, where=loaded.where, name=loaded.name)
  if len(layout.configs):
    return TuningGraphs([layout], [])
  why = f"{loaded.where}: none of the {len(message.runs)} runs that were measured is the default"
  return TuningGraphs([], [why])


def layout_graph(tuning: proto.ModuleTuningData, *, where: str, name: str) -> module_graph.HloGraph:
  """A program with its layout configurations, of which there are none without a default run.

  Raises:
    ValueError: the module, a run, or the list of configurable nodes is wrong.
  """
  op_graph = module_graph.featurize_module(tuning.module, where=where, name=name)
  config_node = np.array(tuning.config_index_to_node, np.uint64)
  if not config_node.size:
    raise ValueError(
      f"{where}: config_index_to_node is empty, expected the configurable nodes of a layout search"
    )
  if len(np.unique(config_node)) < len(config_node):
    raise ValueError(f"{where}: config_index_to_node names a node twice")
  if config_node.max() >= op_graph.num_nodes:
    raise ValueError(
      f"{where}: config_index_to_node has {config_node.max()}, expected "
      f"nodes below {op_graph.num_nodes}"
    )
  try:
    configs = _layout_configs(_layout_runs(tuning, where=where), config_node.size)
  except OverflowError as error:
    raise ValueError(f"{where}: a layout names a dimension beyond 127") from error
  return dataclasses.replace(op_graph, config_node=config_node.astype(np.int32), configs=configs)


def tile_graphs(tuning: proto.TuningData, *, where: str, name: str) -> TuningGraphs:
  """The kernels of a file with their tile sizes, named by file and fingerprint.

  A module without at least two runs, or with a run without a tile size, is left
  out. Modules of one file that share a name share the normalizer of the last.

  Raises:
    ValueError: a module is inconsistent, or has no default among its good runs.
  """
  entries, skipped, default_ns = [], [], {}
  for number, entry in enumerate(tuning.modules):
    entry_where = f"{where}: module {number} {entry.module.name!r}"
    reason = _tile_skip_reason(entry)
    if reason:
      skipped.append(f"{entry_where}: {reason}")
      continue
    runs = [run for run in entry.runs if not run.error and run.profile.compute_time_ns > 1]
    default = next((run for run in runs if run.is_default), None)
    if default is None:
      raise ValueError(f"{entry_where}: none of its {len(runs)} good runs is the default")
    default_ns[entry.module.name] = default.profile.compute_time_ns
    entries.append((entry, entry_where, runs))
  graphs = []
  for entry, entry_where, runs in entries:
    graph_name = f"{name}_{signed_hex(entry.fingerprint)}"
    op_graph = module_graph.featurize_module(entry.module, where=entry_where, name=graph_name)
    graphs.append(op_graph.as_kernel(_tile_configs(runs, default_ns[entry.module.name])))
  return TuningGraphs(graphs, skipped)


def signed_hex(fingerprint: int) -> str:
  """A 64-bit fingerprint as the data set writes it into file names."""
  return format(fingerprint - _INT64 if fingerprint >= _INT64 // 2 else fingerprint, "x")


def _layout_runs(tuning: proto.ModuleTuningData, *, where: str) -> list[proto.ConfigProfile]:
  """The runs with a layout, a profile and no error, in their order.

  No run is returned where none of them is the default.

  Raises:
    ValueError: a run has no positive time, or a layout that does not fit.
  """
  runs = []
  for number, run in enumerate(tuning.runs):
    if not run.HasField("module_config") or run.error or not run.HasField("profile"):
      continue
    problem = _layout_problem(run, nodes=len(tuning.config_index_to_node))
    if problem:
      raise ValueError(f"{where}: run {number} {problem}")
    runs.append(run)
  return runs if any(run.is_default for run in runs) else []


def _layout_problem(run: proto.ConfigProfile, *, nodes: int) -> str | None:
  if run.profile.compute_time_ns <= 0:
    return f"has compute_time_ns {run.profile.compute_time_ns}, expected above 0"
  if not run.module_config.HasField("layout_config"):
    return "has a module_config without layout_config"
  layouts = run.module_config.layout_config.nodes
  if len(layouts) != nodes:
    return f"has layouts for {len(layouts)} nodes, config_index_to_node has {nodes}"
  tensors = max((len(layout.tensors) for layout in layouts), default=0)
  if tensors > _TENSORS:
    return f"has a node with {tensors} tensors, expected at most {_TENSORS}"
  return None


def _layout_configs(runs: Sequence[proto.ConfigProfile], nodes: int) -> graph.LayoutConfigs:
  """The layouts of runs in factored form; see `graph.LayoutConfigs`."""
  row_id: dict[tuple[int, ...], int] = {}
  ids = np.zeros((len(runs), nodes), np.int64)
  for config, run in enumerate(runs):
    for node, layout in enumerate(run.module_config.layout_config.nodes):
      row = columns.layout_row([tensor.dims for tensor in layout.tensors])
      ids[config, node] = row_id.setdefault(row, len(row_id))
  groups, node_group = np.unique(ids, axis=1, return_inverse=True)
  rows = np.array(list(row_id), np.int8).reshape(-1, columns.LAYOUT_CONFIG_FEATURES)
  dtype = np.min_scalar_type(max(len(rows) - 1, 0))
  node_group = node_group.ravel().astype(np.int32)
  return graph.LayoutConfigs(rows, node_group, groups.astype(dtype), _runtime_ns(runs))


def _tile_skip_reason(entry: proto.ModuleTuningData) -> str | None:
  if len(entry.runs) <= 1:
    return f"{len(entry.runs)} runs, at least 2 are needed"
  if not entry.HasField("module"):
    return "no HLO module"
  # An unset op_config reads as an empty one, which has no tile size either.
  without = sum(not run.op_config.HasField("tile_size_config") for run in entry.runs)
  return f"{without} of {len(entry.runs)} runs without a tile size" if without else None


def _tile_configs(runs: Sequence[proto.ConfigProfile], default_ns: int) -> graph.TileConfigs:
  tiles = [run.op_config.tile_size_config for run in runs]
  feat = columns.released_tile_features(
    [tile.kernel_bounds for tile in tiles],
    [tile.output_bounds for tile in tiles],
    [tile.input_bounds for tile in tiles],
  )
  return graph.TileConfigs(feat, _runtime_ns(runs), np.full(len(runs), default_ns, np.int64))


def _runtime_ns(runs: Sequence[proto.ConfigProfile]) -> np.ndarray:
  return np.array([run.profile.compute_time_ns for run in runs], np.int64)


@dataclasses.dataclass(frozen=True)
class Converted:
  """The files that `convert` wrote, and the inputs from which it wrote none."""

  written: list[Path]
  skipped: list[str]  # one line for each module that was left out by rule
  failed: list[str]  # one line for each file that could not be read, or graph not written


def convert(
  paths: Sequence[str | os.PathLike[str]],
  out: str | os.PathLike[str],
  *,
  processes: int | None = None,
) -> Converted:
  """Writes the graphs of `.pb` files as `.npz` files into one folder.

  `PROGRAM.pb` with layouts becomes `PROGRAM.npz`, with tile sizes one
  `PROGRAM_FINGERPRINT.npz` per kernel. A file that cannot be read leaves nothing
  behind and stops no other.

  Args:
    paths: the files.
    out: the folder, made where it does not exist.
    processes: how many processes share the files; as many as processors if not given.

  Raises:
    ValueError: two inputs would write the same file.
  """
  stems = collections.Counter(sources.stem(Path(path)) for path in paths)
  name, count = stems.most_common(1)[0] if stems else ("", 0)
  if count > 1:
    raise ValueError(
      f"{count} inputs are named {name}, and their "
      "results would overwrite each other; convert them to different folders"
    )
  out = files.expanded(out)
  out.mkdir(parents=True, exist_ok=True)
  convert_file = functools.partial(_convert_file, out)
  processes = processes or os.cpu_count() or 1
  with console.working("converting", total=len(paths), unit="files") as work:
    finished = lambda _: work.update()
    results = tasks.run(convert_file, paths, processes=processes, finished=finished)
  return Converted(
    written=[path for result in results for path in result.written],
    skipped=[line for result in results for line in result.skipped],
    failed=[line for result in results for line in result.failed],
  )


def _convert_file(out: Path, path: str | os.PathLike[str]) -> Converted:
  try:
    read = read_tuning(path)
  except (ValueError, OSError) as error:
    return Converted([], [], [str(error)])
  written, failed = [], []
  counts: collections.Counter[str] = collections.Counter()
  for op_graph in read.graphs:
    counts[op_graph.name] += 1  # kernels of one fingerprint have one name, and are numbered
    number = f"_{counts[op_graph.name]}" if counts[op_graph.name] > 1 else ""
    op_graph = dataclasses.replace(op_graph, name=op_graph.name + number)
    target = out / f"{op_graph.name}.npz"
    try:
      _write(target, op_graph)
    except ValueError as error:
      failed.append(str(error))
    else:
      written.append(target)
  return Converted(written, read.skipped, failed)


def _write(target: Path, op_graph: module_graph.HloGraph) -> None:
  """Writes a graph; a file that its reader refuses (ValueError) is never there."""
  is_layout = isinstance(op_graph.configs, graph.LayoutConfigs)
  write = npz.write_layout if is_layout else npz.write_tile
  read = npz.read_layout if is_layout else npz.read_tile
  with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert") as folder:
    partial = Path(folder) / target.name
    write(partial, op_graph)
    read(partial)
    os.replace(partial, target)
