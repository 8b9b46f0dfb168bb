"""Collections by name: the released five, and own ones beside them."""

from pathlib import Path
import shutil
import types

import numpy as np
import parts
import pytest

from tpugraphs_jax import collections, submission
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import npz, store, synthetic
from tpugraphs_jax.run import training
from tpugraphs_jax.serve import judge

OWN = {"tile": "tile:own:my_kernels", "layout": "layout:own:my-programs.2"}


@pytest.mark.parametrize("name", [*collections.RELEASED, *OWN.values()])
def test_a_collection_knows_its_kind_and_its_folder(name):
  found = Collection(name)
  assert found.kind == name.split(":")[0]
  assert found.is_released == (name in collections.RELEASED)
  assert found.folder(Path("/data"), "valid") == Path("/data", *name.split(":"), "valid")
  assert found.slowdown_ks == ((1, 5, 10) if found.kind == "tile" else (1, 10, 100))


@pytest.mark.parametrize("name", [
    "", "tile", "tile:nlp", "layout:xla", "layout:own", "layout:own:", "layout:own:a:b",
    "own:layout:a", "layout:own:../a", "layout:own:.hidden", "layout:own:a b", "tile:own:é"])
def test_other_names_are_refused(name):
  with pytest.raises(ValueError, match="unknown collection .*one of tile:xla.* layout:own"):
    Collection(name)


def test_names_come_from_the_fields_of_a_config():
  assert collections.of("tile", "xla").name == "tile:xla"
  assert collections.of("layout", "nlp", "default").name == "layout:nlp:default"
  assert collections.of("tile", "own", "mine").name == "tile:own:mine"
  with pytest.raises(ValueError):
    collections.of("tile", "xla", "random")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
  """The synthetic collections, also as own ones."""
  released = {"tile": "tile:xla", "layout": "layout:xla:random"}
  root = synthetic.generate(
      tmp_path_factory.mktemp("data"), collections=released.values(), limit=3, progress=False)
  for kind, name in OWN.items():
    shutil.copytree(root.joinpath(*released[kind].split(":")), root.joinpath(*name.split(":")))
  return root


def variant_of(kind):
  return f"own-{OWN[kind].split(':')[2]},ci"


@pytest.mark.parametrize("kind", OWN)
def test_own_collections_are_read_trained_ranked_and_judged(kind, data_root, tmp_path):
  config = parts.config_of(kind, variant_of(kind), **{
      "model.hidden_dim": 4, "model.num_gnns": 1, "train.epochs": 1, "batch.slates_per_epoch": 4,
      "batch.graphs": 4})
  with config.unlocked():
    config.data_root = str(data_root)
  training.run(config, tmp_path)
  results = (tmp_path / "results.csv").read_text().splitlines()
  files = npz.split_files(data_root, OWN[kind], "test")
  assert [line.split(",")[0] for line in results[1:]] == [
      f"{OWN[kind]}:{path.stem}" for path in files]
  assert len((tmp_path / "validation.csv").read_text().splitlines()) == 1 + len(
      npz.split_files(data_root, OWN[kind], "valid"))
  # Results are there, but they are no part of a submission.
  with pytest.raises(ValueError, match="is not tile:xla:<name>"):
    submission.read_results(tmp_path / "results.csv")


def test_the_store_lists_own_collections(data_root, capsys):
  assert store.main(["build", "--data_root", str(data_root)]) == 0
  printed = capsys.readouterr().out
  assert f"{OWN['layout']} train" in printed and "layout:xla:random train" in printed
  assert store.main(["verify", "--data_root", str(data_root), "--collection", OWN["layout"]]) == 0
  with pytest.raises(ValueError, match="tile:own:my_kernels has no store"):
    store.graph_folders(data_root, OWN["tile"], "train")


def test_summaries_name_the_collection():
  rows = [{"graph": "a_1", "slowdown1": 0.5, "slowdown5": 0.25}]
  lines = judge.summary(Collection(OWN["tile"]), rows, {"opa": 0.5}).splitlines()
  assert [lines[0], lines[2]] == [
      f"{OWN['tile']}: 1 graphs  opa_pooled 0.5000", "  a: slowdown1 0.5000  slowdown5 0.2500"]
  assert judge.summary(Collection(OWN["layout"]), rows, {"opa": 0.5}).count("\n") == 1


def a_graph(name, runtime):
  return types.SimpleNamespace(name=name, opcode=np.zeros(3), configs=types.SimpleNamespace(
      runtime_ns=np.asarray(runtime, np.int64)))


def test_a_random_order_stands_beside_the_ranker():
  graphs, ids = [a_graph("a_1", [10, 20, 30])], [np.array([0, 2])]
  random = judge.random_order(Collection("tile:xla"), graphs, ids)
  assert random == {"opa": 0.5, "kendaltau": 0.0, "slowdown1": 1.0, "slowdown5": 0.0,
                    "slowdown10": 0.0}
  rows = [{"graph": "a_1", "slowdown1": 0.25, "slowdown5": 0.0}]
  first, second, protocol, *_ = judge.summary(
      Collection("tile:xla"), rows, {"opa": 0.75, "slowdown1": 0.25}, random=random,
      configurations="a seeded 2 of each graph").splitlines()
  assert first == "tile:xla: 1 graphs  opa_pooled 0.7500  slowdown1_mean 0.2500"
  assert second.split()[-4:] == ["opa_pooled", "0.5000", "slowdown1_mean", "1.0000"]
  assert second.index("opa") >= len("  a random order:  ")
  assert "configurations: a seeded 2 of each graph" in protocol


def test_scores_are_kept_beside_what_was_measured(tmp_path):
  graphs = [a_graph("b", [10, 20, 30]), a_graph("a", [5, 7])]
  ids, scores = [np.array([2, 0]), np.array([1])], [np.float32([0.5, 0.25]), np.float32([1.5])]
  judge.write_scores(tmp_path / "s.npz", graphs, ids, scores)
  with np.load(tmp_path / "s.npz") as file:
    assert file["graphs"].tolist() == ["b", "a"] and file["sizes"].tolist() == [2, 1]
    assert file["config_ids"].tolist() == [2, 0, 1]
    assert file["runtime_ns"].tolist() == [30, 10, 7] and file["runtime_ns"].dtype == np.int64
    assert file["scores"].tolist() == [0.5, 0.25, 1.5]
