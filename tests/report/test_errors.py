"""Kendall tau by what graphs have in common."""

import numpy as np
import pytest

from tests.support.run_folders import move, write_fold, write_run, write_scores
from tpugraphs_jax.columns import opcode_names
from tpugraphs_jax.report import errors, runs

UP, DOWN = np.arange(4), np.arange(4)[::-1]


def group_of(folder, scores, has_order=None):
  """A run whose graphs have 7, 1,007, 2,007, ... nodes and 4 configurations."""
  names = [f"g{number}" for number in range(len(scores))]
  run = write_run(folder, sizes=(4,) * min(len(scores), 6))
  write_scores(run, names, [np.arange(10, 14)] * len(names), scores, has_order)
  return run, lambda: runs.groups_of([runs.read(run)])[0]


def test_thirds_by_size_have_their_means_without_graphs_that_have_no_order(tmp_path):
  scores = [UP, UP, UP, UP, DOWN, DOWN, UP]
  _, group = group_of(tmp_path / "run", scores, [True] * 6 + [False])
  assert errors.rows(group()) == [
    ("7 to 1,007 nodes", 2, pytest.approx(1), 0),
    ("2,007 to 3,007 nodes", 2, pytest.approx(1), 0),
    ("4,007 to 5,007 nodes", 2, pytest.approx(-1), pytest.approx(0.3)),
    ("4 configurations", 6, pytest.approx(1 / 3), pytest.approx(0.1)),
  ]


def test_parts_have_the_graphs_of_all_test_folds(tmp_path):
  taus = [(1, 1, 1), (-1, -1, -1), (1, 1, 1)]
  found = [runs.read(write_fold(tmp_path / f"{k}", k, some)) for k, some in enumerate(taus)]
  *_, last = errors.rows(runs.groups_of(found)[0])
  assert last[:3] == ("7 configurations", 9, pytest.approx(1 / 3))


def test_few_graphs_have_no_table(tmp_path):
  _, group = group_of(tmp_path / "run", [UP] * 5)
  assert errors.rows(group()) == []


def test_opcodes_with_the_lowest_tau_and_those_never_in_training_are_named(tmp_path):
  run, group = group_of(tmp_path / "run", [DOWN, DOWN, DOWN, UP, UP, UP])
  root = tmp_path / "npz"
  for split, count in (("train", 1), ("valid", 6)):
    folder = root / "tile" / "xla" / split
    folder.mkdir(parents=True)
    for number in range(count):
      codes = [24, 11] if (split, number // 3) == ("valid", 1) else [24, 26]
      np.savez(folder / f"g{number}.npz", node_opcode=np.array(codes, np.uint8))
  move(run, root)
  found = {title: (count, tau) for title, count, tau, _ in errors.rows(group())}
  first, second, last = list(found)[-3:]
  assert first == f"with {opcode_names()[26]}" and found[first] == (3, pytest.approx(-1))
  assert second == f"with {opcode_names()[11]}" and found[second] == (3, pytest.approx(1))
  assert last == "with an opcode that no training graph has" and found[last][0] == 3
  (root / "tile/xla/valid/g3.npz").unlink()
  assert not [title for title, *_ in errors.rows(group()) if title.startswith("with")]
