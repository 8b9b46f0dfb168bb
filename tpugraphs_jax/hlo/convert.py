"""The data set's tuning records to `.npz` files in the released format."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import multiprocessing
import os
from pathlib import Path

import numpy as np
import tqdm

from tpugraphs_jax import files
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.hlo import extra, module_graph, sources, tuning


@dataclasses.dataclass(frozen=True)
class Converted:
  """What became of the inputs."""

  written: list[Path]
  skipped: list[str]  # one line for each module that was left out by rule
  failed: list[str]  # one line for each file that could not be read


def convert(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *,
    extra_out: str | os.PathLike[str] | None = None, jobs: int | None = None,
) -> Converted:
  """Writes the graphs of `.pb` files as `.npz` files into one folder.

  `PROGRAM.pb` with layouts becomes `PROGRAM.npz`, with tile sizes one
  `PROGRAM_FINGERPRINT.npz` per kernel. A file that cannot be read leaves nothing
  behind and stops no other.

  Args:
    paths: the files.
    out: the folder, made where it does not exist.
    extra_out: a folder for the extra features of every graph, under the same
      file name: `node_extra` [N, 46] float32 and `node_extra_names` [46].
    jobs: how many processes share the files; as many as processors if not given.

  Raises:
    ValueError: two inputs would write the same file.
  """
  stems = collections.Counter(sources.stem(Path(path)) for path in paths)
  name, count = stems.most_common(1)[0] if stems else ("", 0)
  if count > 1:
    raise ValueError(f"{count} inputs are named {name}, and their "
                     "results would overwrite each other; convert them to different folders")
  out, extra_out = Path(out), Path(extra_out) if extra_out else None
  for folder in filter(None, (out, extra_out)):
    folder.mkdir(parents=True, exist_ok=True)
  tasks = [(Path(path), out, extra_out) for path in paths]
  results = _results(tasks, min(jobs or os.cpu_count() or 1, len(tasks)))
  return Converted(
      written=[path for result in results for path in result.written],
      skipped=[line for result in results for line in result.skipped],
      failed=[line for result in results for line in result.failed])


def _results(tasks: list[tuple], jobs: int) -> list[Converted]:
  """One result per file, in the order of the files."""
  if jobs <= 1:
    return [_convert_file(*task) for task in tqdm.tqdm(tasks, unit="file", disable=None)]
  # Fresh processes: forking one that has threads (jax, absl) can hang.
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
    pending = [pool.submit(_convert_file, *task) for task in tasks]
    for _ in tqdm.tqdm(futures.as_completed(pending), total=len(tasks), unit="file", disable=None):
      pass
    return [future.result() for future in pending]


def _convert_file(path: Path, out: Path, extra_out: Path | None) -> Converted:
  try:
    read = tuning.read_tuning(path)
    graphs = _with_distinct_names(read.graphs)
  except (ValueError, OSError) as error:
    return Converted([], [], [str(error)])
  written = []
  for op_graph in graphs:
    target = out / f"{op_graph.name}.npz"
    is_layout = isinstance(op_graph.configs, LayoutConfigs)
    (npz.write_layout if is_layout else npz.write_tile)(target, op_graph)
    written.append(target)
    if extra_out:
      _write_extra(extra_out / target.name, op_graph)
  return Converted(written, read.skipped, [])


def _with_distinct_names(
    graphs: list[module_graph.HloGraph]
) -> list[module_graph.HloGraph]:
  """Numbers the graphs whose name, so whose fingerprint, another one has too."""
  seen: collections.Counter[str] = collections.Counter()
  result = []
  for op_graph in graphs:
    seen[op_graph.name] += 1
    count = seen[op_graph.name]
    result.append(op_graph if count == 1 else
                  dataclasses.replace(op_graph, name=f"{op_graph.name}_{count}"))
  return result


def _write_extra(target: Path, op_graph: module_graph.HloGraph) -> None:
  features = extra.extra_features(op_graph)
  with files.replacing(target, "wb") as file:
    np.savez_compressed(
        file, node_extra=features.values, node_extra_names=np.array(features.names))
