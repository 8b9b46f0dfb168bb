"""Large programs and many files under a limit on memory; as a script, runs a single case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import resource
import subprocess
import sys

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import numpy as np

from benchmarks import workloads
from tools.faults.table import Row

_BYTES = 4 << 30
_SECONDS = 3600  # limit for one case
_LARGEST = dict(nodes=43_615, config_nodes=1_960)  # of the released programs


def _program(*, configs: int, **sizes: int):
  return workloads.program(np.random.default_rng(0), configs=configs, **(sizes or _LARGEST))


def _ranks(graph, ranker) -> None:
  order, scores = ranker.rank(graph)
  assert np.isfinite(scores).all() and len(np.unique(order)) == len(graph.configs)


def _ranker(variant: str, graph, **options: int):
  """A layout ranker of a variant with random parameters, fitted to a graph."""
  import jax

  from tpugraphs_jax.rankers.ranker import Ranker
  from tpugraphs_jax.run import configs

  config = configs.load(f"layout.py:xla-random{variant}")
  config = config.replace(**{f"eval.{name}": value for name, value in options.items()})
  ranker, rng = Ranker(config), np.random.default_rng(0)
  ranker.features.fit([graph])
  ranker.fit_configs([graph.configs.rows])
  shapes = ranker.param_shapes(_program(nodes=400, config_nodes=40, configs=2))
  ranker.params = jax.tree.map(
    lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype), shapes
  )
  return ranker


def _rank_with_tables(folder: Path, *, configs: int, **sizes: int) -> None:
  graph = _program(configs=configs, **sizes)
  _ranks(graph, _ranker(",tables", graph))


def _rank_in_segments(folder: Path, *, configs: int) -> None:
  graph = _program(configs=configs)
  _ranks(graph, _ranker(",gst_ed", graph))


def _rank_whole(folder: Path, *, configs: int, at_a_time: int = 0) -> None:
  graph = _program(configs=configs)
  options = dict(configs=at_a_time, graphs=1) if at_a_time else {}
  _ranks(graph, _ranker(",full", graph, **options))


def _load_files(folder: Path, *, kind: str, files: int) -> None:
  """Loads a training split of `files` files twice; for layouts, the first time builds the store."""
  from tpugraphs_jax import synthetic
  from tpugraphs_jax.data import npz
  from tpugraphs_jax.data.selection import LayoutData, TileData
  from tpugraphs_jax.datasets import Collection

  name = {"tile": "tile:xla", "layout": "layout:xla:random"}[kind]
  root = synthetic.generate(folder, collections=[name], progress=False)
  first = npz.split_files(root, name, "train")[0]
  for number in range(files - len(npz.split_files(root, name, "train"))):
    os.link(first, first.with_name(f"more_{number}.npz"))
  data = (TileData if kind == "tile" else LayoutData)(Collection(name), str(root))
  for _ in range(2):  # without the store, then with it
    assert len(data.load("train")) == files


# Function, arguments at full size and in the short form, and whether it must succeed, by name.
CASES: dict[str, tuple[Callable[..., None], dict, dict, bool]] = {
  "program of 43,615 nodes, score tables": (
    _rank_with_tables,
    dict(configs=7504),
    dict(configs=7504),
    True,
  ),
  "100,040 configurations, score tables": (
    _rank_with_tables,
    dict(nodes=3000, config_nodes=200, configs=100_040),
    dict(nodes=3000, config_nodes=200, configs=100_040),
    True,
  ),
  "program of 43,615 nodes, segments": (
    _rank_in_segments,
    dict(configs=7504),
    dict(configs=100),
    True,
  ),
  "program of 43,615 nodes, whole": (_rank_whole, dict(configs=64), dict(configs=64), False),
  "program of 43,615 nodes, whole, a few at a time": (
    _rank_whole,
    dict(configs=7504, at_a_time=4),
    dict(configs=8, at_a_time=4),
    True,
  ),
  "small kernels": (
    _load_files,
    dict(kind="tile", files=25_000),
    dict(kind="tile", files=250),
    True,
  ),
  "small programs": (
    _load_files,
    dict(kind="layout", files=25_000),
    dict(kind="layout", files=250),
    True,
  ),
}

SHORT = ("program of 43,615 nodes, score tables", "program of 43,615 nodes, whole", "small kernels")


def rows(folder: Path, *, full: bool, cases: tuple[str, ...] = tuple(CASES)) -> Iterator[Row]:
  """Runs every case in a process that may take 4 GiB of memory; yields one row.

  Args:
    folder: folder for data.
    full: use at least as many configurations and files as the released collections have.
    cases: keys of `CASES`.
  """
  row = Row("load, 4 GiB of memory")
  for number, case in enumerate(cases):
    place = folder / f"load_{number}"
    try:
      ended = subprocess.run(
        [sys.executable, __file__, case, str(place), str(int(full))],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
      )
      row.count(_outcome(ended, has_to_work=CASES[case][3]), of=case)
    except subprocess.TimeoutExpired:
      row.count(f"took more than {_SECONDS} s", of=case)
  yield row


def _outcome(ended: subprocess.CompletedProcess, *, has_to_work: bool) -> str:
  said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
  if not ended.returncode:
    return "survived"
  is_told = len(said) == 1 and "Traceback" not in ended.stderr and "bytes" in said[0]
  return "refused" if is_told and not has_to_work else (ended.stderr[-600:] or str(ended))


def main(case: str, folder: str, full: str) -> int:
  """Runs one case under the limit on memory; returns the exit code."""
  resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
  do, at_full_size, short, _ = CASES[case]
  options = at_full_size if int(full) else short
  try:
    do(Path(folder), **options)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
