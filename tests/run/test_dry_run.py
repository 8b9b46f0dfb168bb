"""A dry run says what a run takes, and touches neither the working folder nor the store."""

import re
import shutil

import pytest

from tests.support import parts
from tpugraphs_jax.data import download, npz, store
from tpugraphs_jax.infra import console
from tpugraphs_jax.run import dry_run


def told(config, data_root, scratch):
  scratch.mkdir()
  return list(dry_run.lines(config.replace(data_root=str(data_root)), scratch))


def by_name(lines):
  return {line.split()[0]: line for line in lines}


@pytest.fixture(scope="module")
def tile(data_root, tmp_path_factory):
  fields = {"model.num_layers": 1, "model.hidden_dim": 8, "train.epochs": 3}
  fields = parts.TINY | fields | {"batch.slates_per_epoch": 12}
  config = parts.config_of("tile", "MLP,ci", **fields)
  return by_name(told(config, data_root, tmp_path_factory.mktemp("tile") / "scratch"))


def seconds(text):
  return float(re.search(r"of ([\d.e+-]+) s", text)[1])


def test_the_files_are_added_up(tile, data_root):
  size = sum(path.stat().st_size for path in data_root.glob("tile/xla/*/*.npz"))
  assert f"{console.size(size)} in {data_root} (train, valid, test)" in tile["files"]
  assert "B free at" in tile["disk"]


def test_steps_and_evaluations_are_those_of_the_config(tile):
  found = re.search(r"([\d,]+) of .* \(mean of (\d+) measured\), (\d+) evaluations", tile["steps"])
  steps, measured, evaluations = map(int, found.groups())
  assert (steps, evaluations) == (9, 3) and 3 <= measured <= 8
  assert seconds(tile["steps"]) > 0 and " on 4 devices" in tile["time"]


def test_the_time_includes_ranking_all_configurations_of_the_test_split(tile, data_root):
  graphs = [npz.read_tile(path) for path in npz.split_files(data_root, "tile:xla", "test")]
  count, taken = re.search(
    r"([\d,]+) configurations of the test split in ([\d.e+-]+) s", tile["ranking"]
  ).groups()
  assert int(count.replace(",", "")) == sum(len(graph.configs) for graph in graphs)
  assert float(taken) > 0


def test_a_store_that_is_not_built_is_bounded_and_not_built(data_root, tmp_path):
  config = parts.config_of(
    "layout", "xla-random,full,ci", **{"data.store_dir": str(tmp_path / "store")}
  )
  found = by_name(told(config, data_root, tmp_path / "scratch"))
  assert not (tmp_path / "store").exists()
  assert "for 7 graphs not yet in it" in found["store"]
  assert "tpugraphs_jax.data.store build" in found["time"] and "steps" not in found
  number, unit = re.search(r"at most about ([\d.]+)(kB|MB)", found["store"]).groups()
  bound = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
  for split in ("train", "valid", "test"):
    store.ensure_store(data_root, "layout:xla:random", split, store_dir=tmp_path / "store")
  large = [
    path
    for path in (tmp_path / "store").rglob("*.npy")
    if path.stem in ("group_row", "node_feat", "edge_index", "labels", "node_opcode")
  ]
  # Without the headers of the files; the bound is printed with three digits.
  assert sum(path.stat().st_size for path in large) - 128 * len(large) <= 1.005 * bound


@pytest.mark.parametrize(
  "kind, collection", [("tile", "tile:xla"), ("layout", "layout:xla:random")]
)
def test_without_data_the_published_sizes_are_told(kind, collection, tmp_path):
  config = parts.config_of(kind, "ci" if kind == "tile" else "xla-random,full,ci")
  found = by_name(told(config, tmp_path / "nowhere" / "npz", tmp_path / "scratch"))
  published = console.size(1e9 * download.PUBLISHED[collection].gigabytes)
  assert f"about {published}" in found["download"]
  assert f"--collections {collection}" in found["download"]
  assert ("store" in found) == (kind == "layout") and "not measured" in found["time"]
  assert not (tmp_path / "nowhere").exists()


def test_missing_data_for_measuring_are_named(data_root, tmp_path):
  shutil.copytree(data_root / "tile" / "xla" / "train", tmp_path / "npz" / "tile" / "xla" / "train")
  for place, there in (("npz", "only train"), ("nowhere", "no data")):
    lines = told(parts.config_of("tile", "ci"), tmp_path / place, tmp_path / f"scratch_{place}")
    needs = f"needs the splits train and valid: {there} at {tmp_path / place}"
    assert needs in by_name(lines)["time"]


def test_folds_need_one_labelled_split(data_root, tmp_path):
  place = tmp_path / "npz/layout/xla/random/train"
  shutil.copytree(data_root / "layout/xla/random/train", place)
  for count, said in ((0, "needs the splits train and valid"), (3, "build the store first")):
    config = parts.config_of("layout", **{"data.folds": count})
    assert said in by_name(told(config, tmp_path / "npz", tmp_path / f"scratch_{count}"))["time"]
