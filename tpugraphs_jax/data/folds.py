"""Folds of the labelled graphs of the released splits train and valid: test splits with labels.

The released test splits have no labels. With `data.folds=5` the labelled graphs of train and valid
are divided into five folds. Fold `data.fold` is the test split, the next one validates, and the
others train. A cohort is in one fold: it has all programs with equal edges and opcodes, or all
kernels of one program. The division depends on the files, not on a seed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
import dataclasses
from fractions import Fraction
import functools
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.data import npz
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.infra import files, trust

FILE = "folds.json"  # the division of a run, in its working folder
LEAST = 3  # one fold tests, one validates, the others train
_DIVIDED = ("train", "valid")  # the splits with labels
_SCHEMA = trust.Record(folds=range(LEAST, 1 << 20), fold=trust.COUNT, fold_of={...: {...: int}})


class _Member(NamedTuple):
  """A labelled graph."""

  collection: str
  place: str  # its file below the folder of the collection, such as `train/alexnet`
  cohort: str
  configs: int


@dataclasses.dataclass(frozen=True)
class Division:
  """The labelled graphs of one or several collections in folds.

  Attributes:
    folds: number of folds.
    fold_of: by collection, the fold of each graph (`train/alexnet`).
    text: sizes of folds and of the largest cohort, and graphs in no fold, in one line.
  """

  folds: int
  fold_of: Mapping[str, Mapping[str, int]]
  text: str = dataclasses.field(default="", compare=False)

  def files(
    self, data_root: str | os.PathLike[str], collection: Collection, fold: int, split: str
  ) -> list[Path]:
    """The files of a split of a run whose test split is `fold`, sorted by name."""
    folder = files.local_of(data_root) / collection.path
    role = lambda number: {0: "test", 1: "valid"}.get((number - fold) % self.folds, "train")
    fold_of = self.fold_of[collection.name]
    paths = (folder / f"{place}.npz" for place, number in fold_of.items() if role(number) == split)
    return sorted(paths, key=lambda path: path.name)

  def write(self, path: Path, fold: int) -> None:
    """Writes the division of a run, and the fold that is its test split."""
    content = {"folds": self.folds, "fold": fold, "fold_of": self.fold_of}
    files.write_json(path, content, indent=1)

  def check(self, path: Path, fold: int) -> None:
    """Refuses (ValueError) the division of an earlier run that differs, or is damaged."""
    if read(path) != (self, fold):
      raise ValueError(
        f"{path} has other folds than the labelled files of the data make now: the run would be "
        "judged on graphs that it was trained on; give it the files that it began with"
      )


def read(path: Path) -> tuple[Division, int]:
  """The division of a run, and the fold that is its test split.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is damaged.
  """
  with trust.json_of(path, _SCHEMA, "train again") as kept:
    for collection, fold_of in kept["fold_of"].items():
      Collection(collection)  # refuses what is none
      for place in fold_of:
        split, _, name = place.partition("/")
        if split not in _DIVIDED:
          raise ValueError(f"split is {split!r}, expected one of {', '.join(_DIVIDED)}")
        trust.name(name)
    return Division(kept["folds"], kept["fold_of"]), kept["fold"]


def divide(
  data_root: str | os.PathLike[str],
  names: Iterable[str],
  folds: int,
  *,
  skip_bad_files: bool = False,
) -> Division:
  """Divides the labelled graphs of train and valid into folds that share no cohort.

  Cohorts are assigned from the largest to the smallest. A cohort counts shares: its graphs and
  configurations of each collection, relative to all of that collection. It goes to the fold with
  the least of these shares so far.

  Args:
    data_root: the folder with tile/ and layout/.
    names: of collections, such as `tile:xla`. A cohort is in the same fold in all of them.
    folds: number of folds, at least `LEAST`.
    skip_bad_files: leave out malformed files instead of raising.

  Raises:
    FileNotFoundError: a collection has no files.
    ValueError: a file is malformed, two graphs of a collection have one name, or a collection has
      too few cohorts.
  """
  members: list[_Member] = []
  left_out: dict[str, list[str]] = collections.defaultdict(list)
  names = sorted(set(names))
  for name in names:
    for path in _files(data_root, name):
      place = f"{path.parent.name}/{path.stem}"
      try:
        cohort, configs = _read(path, name.partition(":")[0], files.state_of(path))
      except npz.NpzError as error:
        if not skip_bad_files:
          raise ValueError(f"{error}; data.skip_bad_files=True leaves such files out") from None
        left_out["malformed"].append(place)
        continue
      if configs:
        members.append(_Member(name, place, cohort, configs))
      else:
        left_out["without labels"].append(place)
  shares = _shares(members)
  fold_of_cohort = _assign(shares, folds)
  fold_of: dict[str, dict[str, int]] = {name: {} for name in names}
  for member in members:
    fold_of[member.collection][member.place] = fold_of_cohort[member.cohort]
  for name, places in fold_of.items():
    if len(set(places.values())) < folds:
      cohorts = {member.cohort for member in members if member.collection == name}
      raise ValueError(
        f"data.folds is {folds}, and the labelled graphs of {name} in {data_root} are of "
        f"{len(cohorts)} cohorts, which do not fill {folds} folds: give fewer"
      )
  return Division(folds, fold_of, _text(members, shares, fold_of_cohort, folds, left_out))


def _files(data_root: str | os.PathLike[str], name: str) -> list[Path]:
  """The files of the divided splits of a collection."""
  paths = [path for split in _DIVIDED for path in npz.files_there(data_root, name, split)]
  names = collections.Counter(path.stem for path in paths)
  twice = next((stem for stem, count in names.items() if count > 1), None)
  if twice is not None:
    raise ValueError(
      f"{name} has two graphs {twice}, one in train and one in valid, and folds mix the two "
      "splits: rename one file"
    )
  return paths or npz.split_files(data_root, name, _DIVIDED[0])  # which raises


@functools.lru_cache(maxsize=1 << 16)
def _read(path: Path, kind: str, state: tuple[int, ...]) -> tuple[str, int]:
  """The cohort of a file, and its number of labelled configurations.

  Args:
    path: the file.
    kind: `tile` or `layout`.
    state: of the file, from `files.state_of`: a file that has changed is read again.
  """
  del state
  edges, opcodes, runtime = npz.read_structure(path, kind)
  configs = len(runtime) if runtime.any() else 0
  if kind == "tile":
    return metrics.program_of(path.stem), configs
  digest = hashlib.sha256(opcodes.astype(np.int64).tobytes())
  digest.update(edges[np.lexsort(edges.T)].astype(np.int64).tobytes())
  return digest.hexdigest(), configs


def _shares(members: Iterable[_Member]) -> dict[str, dict[tuple[str, str], Fraction]]:
  """Shares of a cohort in the graphs and configurations of each collection, by cohort."""
  counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  for member in members:
    counts[member.cohort][member.collection, "graphs"] += 1
    counts[member.cohort][member.collection, "configurations"] += member.configs
  total = sum(counts.values(), collections.Counter())
  share = lambda sizes: {key: Fraction(count, total[key]) for key, count in sizes.items()}
  return {cohort: share(sizes) for cohort, sizes in counts.items()}


def _assign(shares: Mapping[str, Mapping[tuple[str, str], Fraction]], folds: int) -> dict[str, int]:
  """The fold of every cohort. Fractions are exact, so that ties are the same on any machine."""
  loads: list[collections.Counter] = [collections.Counter() for _ in range(folds)]
  fold_of = {}
  for cohort, sizes in sorted(shares.items(), key=lambda item: (-sum(item[1].values()), item[0])):
    costs = [sum(load[key] * share for key, share in sizes.items()) for load in loads]
    fold_of[cohort] = costs.index(min(costs))
    loads[fold_of[cohort]].update(sizes)
  return fold_of


def _text(
  members: list[_Member],
  shares: Mapping[str, Mapping[tuple[str, str], Fraction]],
  fold_of_cohort: Mapping[str, int],
  folds: int,
  left_out: Mapping[str, list[str]],
) -> str:
  """The text of a `Division`."""
  of_fold = [
    [member for member in members if fold_of_cohort[member.cohort] == k] for k in range(folds)
  ]
  graphs = ", ".join(f"{len(some):,}" for some in of_fold)
  configs = ", ".join(f"{sum(member.configs for member in some):,}" for some in of_fold)
  place_of = {member.cohort: member.place for member in reversed(members)}
  largest = max(shares, key=lambda cohort: (sum(shares[cohort].values()), place_of[cohort]))
  cohort = [member for member in members if member.cohort == largest]
  larger = [place_of[cohort] for cohort in shares if max(shares[cohort].values()) * folds > 1]
  parts = [
    f"{folds} of {len(members):,} graphs in {len(shares):,} cohorts: {graphs} graphs with "
    f"{configs} configurations",
    f"the largest cohort, of {place_of[largest]}, has {len(cohort):,} of the graphs and "
    f"{sum(member.configs for member in cohort):,} of the configurations",
  ]
  if larger:
    parts.append(f"cohorts with more than 1/{folds}, so that folds differ: {', '.join(larger)}")
  parts += [f"in no fold, {why}: {', '.join(places)}" for why, places in left_out.items()]
  return "; ".join(parts)
