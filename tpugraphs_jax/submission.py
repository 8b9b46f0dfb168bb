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

from collections.abc import Iterable, Iterator, Mapping, Sequence
import csv
import os
from pathlib import Path
import re
import sys
from typing import NamedTuple, TextIO

import numpy as np

from tpugraphs_jax import datasets, metrics
from tpugraphs_jax.data import folds, npz
from tpugraphs_jax.infra import console, files, trust

HEADER = "ID,TopConfigs"
# The competition scores the best five of a tile graph.
TILE_TOP = 5
_SHOWN_PROBLEMS = 20
_MOST_CHARACTERS = 1 << 22  # of a line; all indices of the largest graph take 600,000
# Possessive (`*+`): a repeated group that can go back takes 75 bytes per character.
_INDICES = re.compile(r"[0-9]{1,9}+(?:;[0-9]{1,9}+)*+")


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


def write_results(
  path: str | os.PathLike[str], collection: str, rankings: Mapping[str, np.ndarray]
) -> None:
  """Writes one collection's rankings; a temporary file is renamed to `path` at the end.

  Args:
    path: the CSV file; one that is there is replaced.
    collection: a released one, or an own one: only results of released ones can be combined.
    rankings: for each graph name, [configs] integer indices, fastest first.

  Raises:
    ValueError: a name or a ranking that no check would accept.
  """
  rows = {}
  for name, ranking in rankings.items():
    row_id = graph_id(collection, name)
    ranking = np.asarray(ranking)
    if ranking.ndim != 1 or not np.issubdtype(ranking.dtype, np.integer):
      raise ValueError(
        f"ranking of {row_id} is {ranking.dtype} {ranking.shape}, expected integers [configs]"
      )
    if problem := _ranking_problem(collection, ranking):
      raise ValueError(f"ranking of {row_id} {problem}")
    rows[row_id] = ranking
  _write(path, rows)


def read_results(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Rankings `[configs]` int64 by ID, in file order.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line that is not `ID,index;index;...`, or an ID twice.
  """
  return {row_id: ranking for row_id, (_, ranking) in _read_rows(path).items()}


def combine(out: str | os.PathLike[str], paths: Sequence[str | os.PathLike[str]]) -> dict[str, int]:
  """Joins several result files into one; returns the rows of each collection.

  Raises:
    FileNotFoundError: one of the files is missing.
    ValueError: no file, a bad line, a layout row that is no permutation, or a
      graph that is in two files.
  """
  if not paths:
    raise ValueError("no file to combine, expected at least one results.csv")
  rankings: dict[str, np.ndarray] = {}
  origin: dict[str, str] = {}
  for path in paths:
    for row_id, (line, ranking) in _read_rows(path).items():
      here = f"{path}:{line}"
      if row_id in origin:
        raise ValueError(
          f"{here}: {row_id} is already in {origin[row_id]}; give each collection's file once"
        )
      if problem := _ranking_problem(split_id(row_id)[0], ranking):
        raise ValueError(f"{here}: {row_id} {problem}")
      rankings[row_id], origin[row_id] = ranking, here
  _write(out, rankings)
  return _rows_per_collection(rankings)


def check(path: str | os.PathLike[str], data_root: str | os.PathLike[str]) -> list[str]:
  """Problems of a submission, one line each naming file and row; none if it is good.

  Expected are exactly the test graphs of the collections that `data_root` has.

  Raises:
    FileNotFoundError: no file at `path`, or no test graph under `data_root`.
    ValueError: a line that cannot be read, an ID twice, or a damaged test graph.
  """
  return _problems(path, _read_rows(path), _files_of(data_root, "test"), data_root, "test")


class Score(NamedTuple):
  """The score of a collection: its mean, the graphs, and the names of those without an order."""

  mean: float
  graphs: int
  without_order: list[str]


def score(
  path: str | os.PathLike[str], data_root: str | os.PathLike[str], *, split: str = "valid"
) -> dict[str, Score]:
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
  if problems := _problems(path, rows, paths, data_root, split):
    raise ValueError(problems[0])
  values_of: dict[str, dict[str, float]] = {name: {} for name in datasets.RELEASED if name in names}
  for row_id, file in paths.items():
    (collection, name), (_, ranking) = split_id(row_id), rows[row_id]
    values_of[collection][name] = _score_of(collection, ranking, file)
  return {name: _mean_score(name, values) for name, values in values_of.items()}


def _mean_score(collection: str, values: Mapping[str, float]) -> Score:
  unordered = [name for name, value in values.items() if np.isnan(value)]
  if len(unordered) == len(values):
    raise ValueError(
      f"{collection}: all runtimes of each graph are equal, so that no order is right or wrong; "
      "score a split with other graphs"
    )
  return Score(metrics.mean(values.values()), len(values), unordered)


def score_folds(
  paths: Sequence[str | os.PathLike[str]], data_root: str | os.PathLike[str], *, split: str = "test"
) -> dict[str, list[tuple[float, int]]]:
  """Score and number of graphs of each collection, in every file of rankings of a fold.

  Args:
    paths: files of runs on folds of the same division, each with another test fold.
    data_root: has the labels.
    split: name of the ranked split.

  Raises:
    FileNotFoundError, ValueError: as `score`, a file without folds, or of other folds than the
      first one, or two files that rank a graph.
  """
  division, _ = _folds_beside(paths[0]) or (None, 0)
  origin: dict[str, str | os.PathLike[str]] = {}
  figures: dict[str, list[tuple[float, int]]] = {}
  for path in paths:
    beside = _folds_beside(path)
    if beside is None or beside[0] != division:
      raise ValueError(
        f"{path} has {'other' if beside else 'no'} folds in {folds.FILE} beside it: several files "
        "are scored together where each has another test fold of one division (data.fold)"
      )
    for row_id in read_results(path):
      if row_id in origin:
        raise ValueError(f"{path} and {origin[row_id]} both rank {row_id}: give each fold once")
      origin[row_id] = path
    for name, (value, graphs, *_) in score(path, data_root, split=split).items():
      figures.setdefault(name, []).append((value, graphs))
  return figures


def _folds_beside(path: str | os.PathLike[str]) -> tuple[folds.Division, int] | None:
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
  path: str | os.PathLike[str],
  rows: Mapping[str, tuple[int, np.ndarray]],
  paths: Mapping[str, Path],
  data_root: str | os.PathLike[str],
  split: str,
) -> list[str]:
  problems = []
  for row_id, (line, ranking) in rows.items():
    if row_id not in paths:
      problems.append(f"{path}:{line}: {row_id} is not a {split} graph of {data_root}")
      continue
    configs = _config_count(paths[row_id])
    if problem := _ranking_problem(split_id(row_id)[0], ranking, configs):
      problems.append(f"{path}:{line}: {row_id} {problem}")
  absent = f"has no row, expected every {split} graph of {data_root}"
  return problems + [f"{path}: {row_id} {absent}" for row_id in paths if row_id not in rows]


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
  if args.command == "check":
    return _run_check(args.submission, args.data_root)
  if args.command == "score":
    first, *others = args.submission
    if others:
      _print_folds(score_folds(args.submission, args.data_root, split=args.split or "test"))
    else:
      split = args.split or ("test" if _folds_beside(first) else "valid")
      _print_scores(score(first, args.data_root, split=split))
  else:
    _print_rows(args.out, "rows", combine(args.out, args.files))
  return 0


def _print_scores(scores: Mapping[str, Score]) -> None:
  for name, score in scores.items():
    what = "Kendall tau" if name.startswith("layout") else "1 - slowdown of the best of five"
    graphs = metrics.mean_of(score.graphs, score.without_order)
    print(f"{name:<20} {score.mean:.4f}  {what}, {graphs}")
  mean = np.mean([score.mean for score in scores.values()])
  print(f"{'mean':<20} {mean:.4f}  of {len(scores)} collections")
  missing = [name for name in datasets.RELEASED if name not in scores]
  if missing:
    which = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in this one"
    warning = f"warning: published scores are means of five collections; {which}"
    print(warning, file=sys.stderr)


def _print_folds(scores: Mapping[str, Sequence[tuple[float, int]]]) -> None:
  for name, of_folds in scores.items():
    values = [value for value, _ in of_folds]
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    graphs = sum(count for _, count in of_folds)
    print(f"{name:<20} {np.mean(values):.4f}{spread}  of {len(values)} test folds, {graphs} graphs")
    print(f"{'':<20} {'  '.join(f'{value:.4f}' for value in values)}")


def _run_check(path: str, data_root: str) -> int:
  problems = check(path, data_root)
  for problem in problems[:_SHOWN_PROBLEMS]:
    print(f"error: {console.one_line(problem)}", file=sys.stderr)
  if len(problems) > _SHOWN_PROBLEMS:
    print(f"error: and {len(problems) - _SHOWN_PROBLEMS} more", file=sys.stderr)
  if problems:
    return 1
  _print_rows(path, "rows, no problem", _rows_per_collection(read_results(path)))
  return 0


def _rows_per_collection(row_ids: Iterable[str]) -> dict[str, int]:
  names = [split_id(row_id)[0] for row_id in row_ids]
  return {name: names.count(name) for name in datasets.RELEASED}


def _print_rows(path: str, what: str, rows: Mapping[str, int]) -> None:
  print(console.printable(f"{path}: {sum(rows.values())} {what}"))
  for collection, count in rows.items():
    print(f"  {collection:<20} {count or 'none'}")


def _ranking_problem(
  collection: str, ranking: np.ndarray, configs: int | None = None
) -> str | None:
  """The first problem of a ranking in words, or None.

  Without the number of configurations only the ranking itself is checked: a layout
  ranking has to be a permutation of as many indices as it has.
  """
  if not ranking.size:
    return "names no configuration"
  is_layout = collection.startswith("layout")
  if configs is not None:
    needed = configs if is_layout else min(TILE_TOP, configs)
    if len(ranking) < needed:
      return f"names {len(ranking)} configurations, expected {needed} of {configs}"
  values, counts = np.unique(ranking, return_counts=True)
  if len(values) < len(ranking):
    return f"names configuration {values[counts.argmax()]} {counts.max()} times"
  if values[0] < 0:
    return f"names configuration {values[0]}, expected indices from 0"
  if configs is None and is_layout:
    configs = len(ranking)
  if configs is not None and values[-1] >= configs:
    return f"names configuration {values[-1]}, expected indices below {configs}"
  return None


def _files_of(
  data_root: str | os.PathLike[str], split: str, kept: tuple[folds.Division, int] | None = None
) -> dict[str, Path]:
  """The files of a split by ID; with folds, the files of its folds."""
  by_id = {}
  for collection in datasets.RELEASED if kept is None else kept[0].fold_of:
    if kept is None:
      paths = npz.files_there(data_root, collection, split)
    else:
      paths = kept[0].files(data_root, datasets.Collection(collection), kept[1], split)
    for path in paths:
      by_id[graph_id(collection, path.stem)] = path
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


def _read_rows(path: str | os.PathLike[str]) -> dict[str, tuple[int, np.ndarray]]:
  """Line number and ranking of each ID."""
  local = files.fetch(path)
  files.check_file(local, "a CSV file of rankings")
  rows: dict[str, tuple[int, np.ndarray]] = {}
  for line, fields in _lines(local, path):
    try:
      row_id, ranking = _read_row(fields)
      if row_id in rows:
        raise ValueError(f"{row_id} is already in line {rows[row_id][0]}")
    except ValueError as error:
      raise ValueError(f"{path}:{line}: {error}") from None
    rows[row_id] = line, ranking
  return rows


def _lines(local: Path, path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
  """Number and fields of each line below the header that is not blank."""
  with open(local, encoding="utf-8-sig", errors="replace", newline="") as file:
    limit = csv.field_size_limit(_MOST_CHARACTERS)
    reader = csv.reader(_short_lines(file, path), strict=True)
    try:
      if (header := next(reader, [])) != HEADER.split(","):
        raise ValueError(f"{path}:1: header is {','.join(header)[:40]!r}, expected {HEADER!r}")
      yield from ((reader.line_num, fields) for fields in reader if any(map(str.strip, fields)))
    except csv.Error as error:
      raise ValueError(f"{path}:{reader.line_num}: {error}") from None
    finally:
      csv.field_size_limit(limit)


def _short_lines(file: TextIO, path: str | os.PathLike[str]) -> Iterator[str]:
  """The lines of a file; refuses (ValueError) one that is longer than any ranking."""
  number = 0
  while line := file.readline(_MOST_CHARACTERS + 1):
    number += 1
    if len(line) > _MOST_CHARACTERS:
      raise ValueError(
        f"{path}:{number}: a line of more than {_MOST_CHARACTERS:,} characters, expected a ranking "
        f"of a graph of the data set, {HEADER}"
      )
    yield line


def _read_row(fields: Sequence[str]) -> tuple[str, np.ndarray]:
  if len(fields) != 2:
    raise ValueError(f"{len(fields)} fields, expected {HEADER}")
  row_id, indices = fields
  split_id(row_id)
  if not _INDICES.fullmatch(indices):
    shown = indices if len(indices) <= 40 else indices[:40] + "..."
    raise ValueError(f"TopConfigs of {row_id} are {shown!r}, expected indices joined by ;")
  return row_id, np.fromstring(indices, np.int64, sep=";")


def _write(path: str | os.PathLike[str], rankings: Mapping[str, np.ndarray]) -> None:
  with files.replacing(path, encoding="utf-8") as file:
    file.write(HEADER + "\n")
    for row_id, ranking in rankings.items():
      file.write(f"{row_id},{';'.join(map(str, ranking.tolist()))}\n")


if __name__ == "__main__":
  sys.exit(main())
