"""Folds share no cohort, depend on the files alone, and are the splits of a run."""

import dataclasses
import itertools
import json
import os

import numpy as np
import pytest

from tests.support import random_graphs
from tpugraphs_jax import config_fields
from tpugraphs_jax.data import folds, npz
from tpugraphs_jax.data.selection import LayoutData, LayoutOptions, TileData, TileOptions
from tpugraphs_jax.datasets import Collection

TILE, LAYOUT, OWN = "tile:xla", "layout:xla:random", "layout:own:mine"
SPLITS = ("train", "valid", "test")


def write(root, collection, split, name, *, structure=0, configs=4, labelled=True):
  """A graph whose edges and opcodes follow from `structure`; all else of it differs by name."""
  is_tile = collection.startswith("tile")
  rng, shape = np.random.default_rng(list(name.encode())), np.random.default_rng(structure)
  make = random_graphs.tile_graph if is_tile else random_graphs.layout_graph
  more = {"columns": 24} if is_tile else {"config_nodes": [1, 3]}
  graph = make(rng, nodes=6, edges=7, configs=configs, name=name, features=140, **more)
  field = "runtime_ns" if is_tile else "labels"
  labels = {field: getattr(graph.configs, field) * labelled}
  graph = dataclasses.replace(
    random_graphs.with_configs(graph, **labels),
    node_opcode=shape.integers(1, 121, 6).astype(np.uint8),
    edge_index=random_graphs.random_edges(shape, 6, 7),
  )
  path = Collection(collection).folder(root, split) / f"{name}.npz"
  path.parent.mkdir(parents=True, exist_ok=True)
  (npz.write_tile if is_tile else npz.write_layout)(path, graph)


def write_cohorts(root, collection, sizes, *, first=0):
  """Graphs of cohorts of these sizes, every third one in valid; returns the cohort by graph."""
  cohorts, count = {}, itertools.count()
  for cohort, size in enumerate(sizes):
    for number in range(size):
      name = f"program{cohort}_{number}"
      split = "valid" if next(count) % 3 == 2 else "train"
      write(root, collection, split, name, structure=first + cohort)
      cohorts[name] = cohort
  return cohorts


def data_of(collection, root, *, fold=0, together=(), **fields):
  of_class, options = (
    (TileData, TileOptions) if collection.startswith("tile") else (LayoutData, LayoutOptions)
  )
  options = options(folds=3, fold=fold, **fields)
  return of_class(Collection(collection), str(root), options, together=together)


def names(data):
  """Names of the graphs of each split."""
  return {split: {path.stem for path in data.files(split)} for split in SPLITS}


@pytest.mark.parametrize("collection", [TILE, LAYOUT, OWN])
def test_every_labelled_graph_is_tested_once_and_no_cohort_is_in_two_splits(tmp_path, collection):
  cohorts = write_cohorts(tmp_path, collection, [2, 2, 1, 2, 1, 1])
  tested = []
  for fold in range(3):
    found = names(data_of(collection, tmp_path, fold=fold))
    assert set().union(*found.values()) == cohorts.keys()
    for first, second in itertools.combinations(SPLITS, 2):
      assert not {cohorts[name] for name in found[first]} & {
        cohorts[name] for name in found[second]
      }
    assert found["valid"] == names(data_of(collection, tmp_path, fold=(fold + 1) % 3))["test"]
    assert all(len(found[split]) == 3 for split in SPLITS)  # nine graphs in three folds
    tested += found["test"]
  assert sorted(tested) == sorted(cohorts)


@pytest.mark.parametrize("collection", [TILE, LAYOUT])
def test_loaded_splits_are_those_of_the_folds(tmp_path, collection):
  write_cohorts(tmp_path, collection, [1, 2, 1, 2])
  data = data_of(collection, tmp_path)
  for split in SPLITS:
    graphs = data.load(split)
    assert [graph.name for graph in graphs] == sorted(names(data)[split])
    assert all(graph.configs.is_labelled for graph in graphs)


def test_edges_in_another_order_are_the_same_cohort_and_configurations_do_not_matter(tmp_path):
  write_cohorts(tmp_path, LAYOUT, [1, 1, 1])
  write(tmp_path, LAYOUT, "valid", "again", structure=1, configs=9)
  path = tmp_path / "layout/xla/random/valid/again.npz"
  graph = npz.read_layout(path)
  npz.write_layout(path, dataclasses.replace(graph, edge_index=graph.edge_index[::-1]))
  fold_of = folds.divide(tmp_path, [LAYOUT], 3).fold_of[LAYOUT]
  assert fold_of["valid/again"] == fold_of["train/program1_0"]
  assert sorted(fold_of.values()) == sorted([0, 1, 2, fold_of["valid/again"]])


def test_folds_are_balanced_by_graphs_and_by_configurations(tmp_path):
  for number, configs in enumerate((40, 30, 20, 20, 30, 40)):
    write(tmp_path, LAYOUT, "train", f"a{number}", structure=number, configs=configs)
  fold_of = folds.divide(tmp_path, [LAYOUT], 3).fold_of[LAYOUT]
  configs = {f"train/a{n}": c for n, c in enumerate((40, 30, 20, 20, 30, 40))}
  for fold in range(3):
    inside = [configs[place] for place, number in fold_of.items() if number == fold]
    assert len(inside) == 2 and sum(inside) == 60


def test_the_division_depends_on_the_files_alone(tmp_path):
  for root, order in ((tmp_path / "a", range(8)), (tmp_path / "b", reversed(range(8)))):
    for number in order:
      write(root, LAYOUT, "train", f"program{number}", structure=number)
  first, second = (folds.divide(tmp_path / name, [LAYOUT], 4) for name in "ab")
  assert first == second
  assert dict(first.fold_of) == dict(second.fold_of)


def test_a_cohort_is_in_the_same_fold_of_every_collection_of_a_run(tmp_path):
  others = "layout:nlp:random"
  write_cohorts(tmp_path, LAYOUT, [1, 1, 1, 1, 1])
  write_cohorts(tmp_path, others, [2, 1, 1, 1], first=2)  # the cohorts 2 to 5 of the other one
  together = (LAYOUT, others)
  division = folds.divide(tmp_path, reversed(together), 3)
  first, second = division.fold_of[LAYOUT], division.fold_of[others]
  for number in range(2, 5):
    (mine,) = [fold for place, fold in first.items() if f"program{number}_0" in place]
    theirs = {fold for place, fold in second.items() if f"program{number - 2}_" in place}
    assert theirs == {mine}
  for fold in range(3):
    found = [names(data_of(name, tmp_path, fold=fold, together=together)) for name in together]
    assert all(by_split[split] for by_split in found for split in SPLITS)


@pytest.mark.parametrize("collection", [TILE, LAYOUT, OWN])
def test_a_cohort_larger_than_a_fold_stays_whole_and_is_said(tmp_path, collection):
  cohorts = write_cohorts(tmp_path, collection, [5, 1, 1, 1])
  division = folds.divide(tmp_path, [collection], 3)
  fold_of = {place.split("/")[1]: fold for place, fold in division.fold_of[collection].items()}
  large = {fold_of[name] for name, cohort in cohorts.items() if cohort == 0}
  assert len(large) == 1 and list(fold_of.values()).count(*large) == 5
  assert "has 5 of the graphs and 20 of the configurations" in division.text
  assert "more than 1/3, so that folds differ: train/program0_0" in division.text
  write_cohorts(tmp_path / "even", collection, [1, 1, 1])
  assert "more than" not in folds.divide(tmp_path / "even", [collection], 3).text


@pytest.mark.parametrize("collection", [TILE, LAYOUT, OWN])
def test_fewer_cohorts_than_folds_are_refused(tmp_path, collection):
  write_cohorts(tmp_path, collection, [3, 2])
  with pytest.raises(ValueError, match="2 cohorts"):
    data_of(collection, tmp_path).load("train")


@pytest.mark.parametrize("collection", [TILE, LAYOUT, OWN])
def test_a_graph_without_labels_is_in_no_fold_and_is_named(tmp_path, collection):
  write_cohorts(tmp_path, collection, [1, 1, 1])
  write(tmp_path, collection, "valid", "unmeasured", structure=9, labelled=False)
  division = folds.divide(tmp_path, [collection], 3)
  assert len(division.fold_of[collection]) == 3
  assert "without labels: valid/unmeasured" in division.text


def test_a_malformed_file_is_refused_or_left_out_by_name(tmp_path):
  write_cohorts(tmp_path, TILE, [1, 1, 1])
  (tmp_path / "tile/xla/train/bad_1.npz").write_bytes(b"no archive")
  with pytest.raises(ValueError, match="skip_bad_files"):
    data_of(TILE, tmp_path).load("train")
  data = data_of(TILE, tmp_path, skip_bad_files=True)
  assert "malformed: train/bad_1" in data.division().text
  assert len(data.load("train")) == 1


def test_graphs_of_one_name_in_both_splits_are_refused(tmp_path):
  for split in ("train", "valid"):
    write(tmp_path, TILE, split, "resnet_1")
  with pytest.raises(ValueError, match="resnet_1"):
    folds.divide(tmp_path, [TILE], 3)


def test_a_collection_without_valid_can_be_divided_and_one_without_files_is_refused(tmp_path):
  for number in range(3):
    write(tmp_path, OWN, "train", f"mine{number}", structure=number)
  assert all(len(some) == 1 for some in names(data_of(OWN, tmp_path)).values())
  with pytest.raises(FileNotFoundError, match="tile"):
    folds.divide(tmp_path, [TILE], 3)


@pytest.mark.parametrize(
  "fields, said",
  [
    (dict(folds=2), "data.folds is 2"),
    (dict(folds=5, fold=5), "data.fold is 5, expected less than data.folds"),
    (dict(fold=1), "data.fold is 1, expected less than data.folds"),
    (dict(folds=-1), "data.folds"),
  ],
)
def test_impossible_folds_are_refused(fields, said):
  with pytest.raises(ValueError, match=said):
    LayoutOptions(**fields)


def test_without_folds_the_released_splits_stay(tmp_path):
  write_cohorts(tmp_path, TILE, [2, 1])
  data = TileData(Collection(TILE), str(tmp_path))
  for split in ("train", "valid"):
    assert data.files(split) == npz.split_files(tmp_path, TILE, split)
  assert config_fields.limits_of(TileOptions)["folds"][0] == 0


def test_kept_folds_are_read_again_and_those_of_changed_files_are_refused(tmp_path):
  root, run = tmp_path / "npz", tmp_path / "run"
  write_cohorts(root, LAYOUT, [1, 1, 1])
  division = folds.divide(root, [LAYOUT], 3)
  division.write(run / folds.FILE, 2)
  division.check(run / folds.FILE, 2)  # in a resumed run
  assert folds.read(run / folds.FILE) == (division, 2)
  with pytest.raises(ValueError, match="other folds"):
    division.check(run / folds.FILE, 1)
  write(root, LAYOUT, "train", "new", structure=7)
  with pytest.raises(ValueError, match="other folds"):
    folds.divide(root, [LAYOUT], 3).check(run / folds.FILE, 2)


@pytest.mark.parametrize(
  "change",
  [
    {"fold_of": {TILE: {"train/../../etc": 0}}},
    {"fold_of": {TILE: {"test/a": 0}}},
    {"fold_of": {"tile:other": {"train/a": 0}}},
    {"fold_of": {TILE: {"train/a": "0"}}},
    {"folds": 0},
  ],
)
def test_nothing_in_a_file_of_folds_is_trusted(tmp_path, change):
  good = {"folds": 3, "fold": 0, "fold_of": {TILE: {"train/a": 0}}}
  path = tmp_path / folds.FILE
  path.write_text(json.dumps(good | change))
  with pytest.raises(ValueError, match=folds.FILE):
    folds.read(path)


def test_a_file_of_the_same_size_and_time_that_replaces_another_is_read_again(tmp_path):
  write_cohorts(tmp_path, LAYOUT, [1, 1, 1, 1])
  path = sorted((tmp_path / "layout/xla/random/train").iterdir())[0]
  with np.load(path) as archive:
    arrays = dict(archive)
  lacks_labels = []
  for scale in (1, 0):
    np.savez(path, **arrays | {"config_runtime": scale * arrays["config_runtime"]})
    os.utime(path, (1, 1))
    lacks_labels.append("without labels" in folds.divide(tmp_path, [LAYOUT], 3).text)
  assert lacks_labels == [False, True]
