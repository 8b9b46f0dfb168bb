"""Rankings as CSV files: write one collection, combine all five, check and score the result.

A file has the header `ID,TopConfigs` and one line per graph. The ID is the
collection and the graph's name, `tile:xla:<name>` or `layout:<source>:<search>:<name>`;
TopConfigs are configuration indices from fastest to slowest, joined by `;`: for a
tile graph the best five at least, for a layout graph all of them.

  python -m tpugraphs_jax.submission combine --out submission.csv results/*.csv
  python -m tpugraphs_jax.submission check submission.csv --data_root ~/data/tpugraphs/npz
  python -m tpugraphs_jax.submission score valid.csv --data_root ~/data/tpugraphs/npz

The released test graphs have no labels: `score` takes rankings of the validation split
(`--do=predict --split=valid`), or of test folds (`data.folds`), one file a fold:

  python -m tpugraphs_jax.submission score out/fold=*/seed_0/results.csv --data_root DIR
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import functools
import os
from pathlib import Path
import re
import sys
from typing import NamedTuple

import numpy as np

from tpugraphs_jax import datasets, metrics
from tpugraphs_jax.data import folds, npz
from tpugraphs_jax.infra import console, files, trust

HEADER = "ID,TopConfigs"
# The competition scores the best five of a tile graph.
TILE_TOP = 5
_SHOWN_PROBLEMS = 20
_MOST_CHARACTERS = 1 << 22  # of a line; all indices of the largest graph take 600,000
# ID and indices, which spreadsheets quote. Possessive (`*+`): a repeated group that can go back
# takes 75 bytes per character.
_LINE = re.compile(r'("?)([^",]*+)\1,("?)([0-9]{1,9}+(?:;[0-9]{1,9}+)*+)\3\s*')
_Place = str | os.PathLike[str]


def graph_id(collection: str, name: str) -> str:
  """The ID of a graph, e.g. `layout:xla:random:resnet50`."""
  datasets.Collection(collection)  # refuses other names
  return f"{collection}:{trust.name(name)}"


def split_id(row_id: str) -> tuple[str, str]:
  """Collection and graph name of an ID; ValueError if it is not a valid one."""
  collection, _, name = row_id.rpartition(":")
  if collection not in datasets.RELEASED or not name:
    raise ValueError(
      f"ID {row_id[:80]!r} is not tile:xla:<name> or layout:<source>:<search>:<name>"
    )
  return collection, trust.name(name)


def write_results(path: _Place, collection: str, rankings: Mapping[str, np.ndarray]) -> None:
  """Writes one collection's rankings; a temporary file is renamed to `path` at the end.

  Args:
    path: the CSV file; one that is there is replaced.
    collection: a released one, or an own one: only results of released ones can be combined.
    rankings: for each graph name, [configs] integer indices, fastest first.

  Raises:
    ValueError: a name or a ranking that no check would accept.
  """
  rows = {graph_id(collection, name): np.asarray(x) for name, x in rankings.items()}
  for row_id, ranking in rows.items():
    if ranking.ndim != 1 or not np.issubdtype(ranking.dtype, np.integer):
      raise ValueError(
        f"ranking of {row_id} is {ranking.dtype} {ranking.shape}, expected integers [configs]"
      )
    if problem := _ranking_problem(collection, ranking):
      raise ValueError(f"ranking of {row_id} {problem}")
  _write(path, rows)


def _write(path: _Place, rankings: Mapping[str, np.ndarray]) -> None:
  with files.replacing(path, encoding="utf-8") as file:
    file.write(HEADER + "\n")
    for row_id, ranking in rankings.items():
      file.write(f"{row_id},{';'.join(map(str, ranking.tolist()))}\n")


class _Row(NamedTuple):
  where: str  # file and line
  ranking: np.ndarray  # [configs] int64


def _read_rows(*paths: _Place) -> dict[str, _Row]:
  """The rows of files by ID, in their order.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line that is not `ID,index;index;...`, or an ID twice.
  """
  rows: dict[str, _Row] = {}
  for path in paths:
    local = files.fetch(path)
    files.check_file(local, "a CSV file of rankings")
    with open(local, encoding="utf-8-sig", errors="replace") as file:
      # Of a longer line only the beginning is read, which is no row.
      lines = iter(functools.partial(file.readline, _MOST_CHARACTERS), "")
      if (header := next(lines, "")).strip().replace('"', "") != HEADER:
        raise ValueError(f"{path}:1: header is {header.strip()[:40]!r}, expected {HEADER!r}")
      for number, line in enumerate(lines, 2):
        if line.strip(" ,\n"):
          row_id, row = _read_row(line, f"{path}:{number}")
          if row_id in rows:
            raise ValueError(f"{row.where}: {row_id} is already in {rows[row_id].where}")
          rows[row_id] = row
  return rows


def _read_row(line: str, where: str) -> tuple[str, _Row]:
  match = _LINE.fullmatch(line)
  if not match:
    raise ValueError(
      f"{where}: {line[:40].strip()!r} is no ID with indices joined by ;, expected {HEADER}"
    )
  try:
    split_id(match[2])
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None
  return match[2], _Row(where, np.fromstring(match[4], np.int64, sep=";"))


def read_results(path: _Place) -> dict[str, np.ndarray]:
  """Rankings `[configs]` int64 by ID, in file order.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line that is not `ID,index;index;...`, or an ID twice.
  """
  return {row_id: row.ranking for row_id, row in _read_rows(path).items()}


def combine(out: _Place, paths: Sequence[_Place]) -> dict[str, int]:
  """Joins several result files into one; returns the rows of each collection.

  Raises:
    FileNotFoundError: one of the files is missing.
    ValueError: a bad line, a layout row that is no permutation, or a graph that is in two files.
  """
  rows = _read_rows(*paths)
  for row_id, row in rows.items():
    if problem := _ranking_problem(split_id(row_id)[0], row.ranking):
      raise ValueError(f"{row.where}: {row_id} {problem}")
  _write(out, {row_id: row.ranking for row_id, row in rows.items()})
  return _rows_per_collection(rows)


def check(path: _Place, data_root: _Place) -> list[str]:
  """Problems of a submission, one line each naming file and row; none if it is good.

  Expected are exactly the test graphs of the collections that `data_root` has.

  Raises:
    FileNotFoundError: no file at `path`, or no test graph under `data_root`.
    ValueError: a line that cannot be read, an ID twice, or a damaged test graph.
  """
  return _problems(
    path, _read_rows(path), _files_of(data_root, "test"), f"test graph of {data_root}"
  )


class Score(NamedTuple):
  """The score of a collection: its mean, the graphs, and the names of those without an order."""

  mean: float
  graphs: int
  without_order: list[str]


def score(path: _Place, data_root: _Place, *, split: str = "valid") -> dict[str, Score]:
  """The competition's metric of a submission, by collection.

  The score of a tile graph is 1 - (best of the first five / best - 1) of runtime / normalizer, the
  score of a layout graph Kendall's tau-b between ranks and runtimes. A collection has the mean over
  its graphs; a layout graph whose runtimes are all equal has no order and is not in it.
  The competition's score is the mean over its five collections (Kaggle, "Google - Fast or Slow?",
  2023).

  Args:
    path: rankings of all graphs of this split of one or more collections.
    data_root: has the labels.
    split: name of the ranked split. With `folds.json` beside the file it is a split of the folds.

  Raises:
    FileNotFoundError: no file at `path`, or no graph under `data_root`.
    ValueError: a line or ranking that no check would accept, a graph without labels, or a
      collection without a graph that has an order.
  """
  rows = _read_rows(path)
  if not rows:
    raise ValueError(f"{path} has no row, expected rankings of the {split} graphs")
  names = {split_id(row_id)[0] for row_id in rows}
  paths = _files_of(data_root, split, _folds_beside(path))
  paths = {row_id: file for row_id, file in paths.items() if split_id(row_id)[0] in names}
  if problems := _problems(path, rows, paths, f"{split} graph of {data_root}"):
    raise ValueError(problems[0])
  values: dict[str, dict[str, float]] = {name: {} for name in datasets.RELEASED if name in names}
  for row_id, file in paths.items():
    collection, name = split_id(row_id)
    values[collection][name] = _score_of(collection, rows[row_id].ranking, file)
  return {name: _mean_score(name, of_graphs) for name, of_graphs in values.items()}


def _mean_score(collection: str, values: Mapping[str, float]) -> Score:
  unordered = [name for name, value in values.items() if np.isnan(value)]
  if len(unordered) == len(values):
    raise ValueError(
      f"{collection}: all runtimes of each graph are equal, so that no order is right or wrong; "
      "score a split with other graphs"
    )
  return Score(metrics.mean(values.values()), len(values), unordered)


def score_folds(
  paths: Sequence[_Place], data_root: _Place, *, split: str = "test"
) -> dict[str, list[Score]]:
  """The scores of each collection in files of rankings of one or more folds.

  Args:
    paths: files of runs on folds of the same division, each with another test fold.
    data_root: has the labels.
    split: name of the ranked split.

  Raises:
    FileNotFoundError, ValueError: as `score`, a file without folds, or of other folds than the
      first one, or two files that rank a graph.
  """
  divisions = [beside and beside[0] for beside in map(_folds_beside, paths)]
  for path, division in zip(paths, divisions):
    if division is None or division != divisions[0]:
      raise ValueError(
        f"{path} has {'other' if division else 'no'} folds in {folds.FILE} beside it: several "
        "files are scored together where each has another test fold of one division (data.fold)"
      )
  _read_rows(*paths)  # refuses a graph in two of them
  scores: dict[str, list[Score]] = {}
  for path in paths:
    for name, found in score(path, data_root, split=split).items():
      scores.setdefault(name, []).append(found)
  return scores


def _folds_beside(path: _Place) -> tuple[folds.Division, int] | None:
  """The folds of the run in whose folder a file is, and its test fold; None without folds."""
  place = files.join(os.path.dirname(os.fspath(path)) or ".", folds.FILE)
  try:
    return folds.read(files.fetch(place))
  except FileNotFoundError:
    return None


def _score_of(collection: str, ranking: np.ndarray, file: Path) -> float:
  """The score of one graph; NaN where all runtimes are equal and no order is right."""
  is_layout = collection.startswith("layout")
  names = ["config_runtime", *["config_runtime_normalizers"] * (not is_layout)]
  with npz.NpzArchive(file) as archive:
    runtime, *others = (archive.read(name) for name in names)
    if not runtime.any():
      raise ValueError(
        f"{file} has no labels: only a split with runtimes can be scored, such as valid"
      )
    for name, values in zip(names, (runtime, *others)):
      if values.min() <= 0:
        archive.fail(f"{name} has the value {values.min()}, expected positive nanoseconds")
  place = np.full(len(runtime), len(runtime), np.int64)
  place[ranking] = np.arange(len(ranking))
  if is_layout:
    return metrics.kendall_tau(place, runtime)
  (normalizer,) = others
  return 1 - metrics.top_k_slowdown(place, runtime / normalizer, [TILE_TOP])[TILE_TOP]


def _problems(
  path: _Place, rows: Mapping[str, _Row], paths: Mapping[str, Path], expected: str
) -> list[str]:
  problems = []
  for row_id, (where, ranking) in rows.items():
    if row_id not in paths:
      problems.append(f"{where}: {row_id} is not a {expected}")
    elif problem := _ranking_problem(split_id(row_id)[0], ranking, _config_count(paths[row_id])):
      problems.append(f"{where}: {row_id} {problem}")
  absent = f"has no row, expected every {expected}"
  return problems + [f"{path}: {row_id} {absent}" for row_id in paths if row_id not in rows]


def _ranking_problem(
  collection: str, ranking: np.ndarray, configs: int | None = None
) -> str | None:
  """The problem of a ranking in words, or None.

  Without the number of configurations only the ranking itself is checked: a layout
  ranking has to be a permutation of as many indices as it has.
  """
  is_layout, different = collection.startswith("layout"), len(np.unique(ranking))
  least = 1 if configs is None else configs if is_layout else min(TILE_TOP, configs)
  most = configs or (len(ranking) if is_layout else 10**9)
  if least <= different == len(ranking) and 0 <= ranking.min() and ranking.max() < most:
    return None
  span = f" from {ranking.min()} to {ranking.max()}" if len(ranking) else ""
  return (
    f"names {len(ranking)} configurations{span}, {different} of them different: expected at least "
    f"{least} different ones below {most:,}"
  )


def _files_of(
  data_root: _Place, split: str, kept: tuple[folds.Division, int] | None = None
) -> dict[str, Path]:
  """The files of a split by ID; with folds, the files of its folds."""
  by_id: dict[str, Path] = {}
  for collection in datasets.RELEASED if kept is None else kept[0].fold_of:
    if kept is None:
      paths = npz.files_there(data_root, collection, split)
    else:
      paths = kept[0].files(data_root, datasets.Collection(collection), kept[1], split)
    by_id |= {graph_id(collection, path.stem): path for path in paths}
  if not by_id:
    raise FileNotFoundError(
      f"no {split} graph under {data_root}; set --data_root to the folder "
      "that holds tile/ and layout/"
    )
  return by_id


def _config_count(path: Path) -> int:
  with npz.NpzArchive(path) as archive:
    shape = archive.member("config_runtime").shape
    if len(shape) != 1:
      archive.fail(f"config_runtime has shape {shape}, expected [C]")
    return shape[0]


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; 1 where a file was checked and is wrong, 2 where it was refused."""
  parser = console.parser("submission", "Combines, checks and scores ranking CSV files.")
  commands = parser.add_subparsers(dest="command", required=True)
  command = commands.add_parser("combine", help="join the collections' results.csv")
  command.add_argument("--out", required=True, help="the CSV file to write")
  command.add_argument("files", nargs="+", metavar="FILE")
  command = commands.add_parser("check", help="compare with the test graphs")
  command.add_argument("submission", metavar="CSV")
  command.add_argument("--data_root", required=True, help="holds tile/ and layout/")
  command = commands.add_parser("score", help="the competition's metric, against labels")
  command.add_argument("submission", nargs="+", metavar="CSV")
  command.add_argument("--data_root", required=True, help="holds the labels")
  command.add_argument(
    "--split", help="the ranked split (default: valid, of a run with data.folds test)"
  )
  args = parser.parse_args(argv)
  if args.command == "combine":
    _print_rows(args.out, "rows", combine(args.out, args.files))
  elif args.command == "check":
    if problems := check(args.submission, args.data_root):
      for problem in problems[:_SHOWN_PROBLEMS]:
        print(f"error: {console.one_line(problem)}", file=sys.stderr)
      if (more := len(problems) - _SHOWN_PROBLEMS) > 0:
        print(f"error: and {more} more", file=sys.stderr)
      return 1
    rows = _rows_per_collection(read_results(args.submission))
    _print_rows(args.submission, "rows, no problem", rows)
  elif len(args.submission) > 1:
    _print_folds(score_folds(args.submission, args.data_root, split=args.split or "test"))
  else:
    (path,) = args.submission
    split = args.split or ("test" if _folds_beside(path) else "valid")
    _print_scores(score(path, args.data_root, split=split))
  return 0


def _rows_per_collection(row_ids: Iterable[str]) -> dict[str, int]:
  names = [split_id(row_id)[0] for row_id in row_ids]
  return {name: names.count(name) for name in datasets.RELEASED}


def _print_rows(path: str, what: str, rows: Mapping[str, int]) -> None:
  print(console.printable(f"{path}: {sum(rows.values())} {what}"))
  for collection, count in rows.items():
    print(f"  {collection:<20} {count or 'none'}")


def _print_scores(scores: Mapping[str, Score]) -> None:
  for name, found in scores.items():
    what = "Kendall tau" if name.startswith("layout") else "1 - slowdown of the best of five"
    graphs = metrics.mean_of(found.graphs, found.without_order)
    print(f"{name:<20} {found.mean:.4f}  {what}, {graphs}")
  mean = np.mean([found.mean for found in scores.values()])
  print(f"{'mean':<20} {mean:.4f}  of {len(scores)} collections")
  if missing := [name for name in datasets.RELEASED if name not in scores]:
    print(
      f"warning: published scores are means of five collections, here without {', '.join(missing)}",
      file=sys.stderr,
    )


def _print_folds(scores: Mapping[str, Sequence[Score]]) -> None:
  for name, of_folds in scores.items():
    values = [found.mean for found in of_folds]
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    graphs = sum(found.graphs for found in of_folds)
    print(f"{name:<20} {np.mean(values):.4f}{spread}  of {len(values)} test folds, {graphs} graphs")
    print(f"{'':<20} {'  '.join(f'{value:.4f}' for value in values)}")


if __name__ == "__main__":
  sys.exit(main())
