"""A working folder and a graph give an order, the same as the commands wrote."""

import dataclasses
import functools
import shutil

import jax
import jobs as jobs_lib
from jobs import COLLECTIONS
import ml_collections
import numpy as np
import pytest

import tpugraphs_jax
from tpugraphs_jax import submission
from tpugraphs_jax.data import features, npz
from tpugraphs_jax.graph import LayoutConfigs, TileConfigs
from tpugraphs_jax.run import job as job_lib
from tpugraphs_jax.serve import ranker as ranker_lib
from tpugraphs_jax.serve.ranker import Ranker

KINDS = tuple(COLLECTIONS)


@pytest.fixture(scope="module")
def jobs():
  return jobs_lib.all_jobs()


@functools.cache
def graph_of(kind, split="test", number=0):
  path = npz.split_files(jobs_lib.all_jobs().data_root, COLLECTIONS[kind], split)[number]
  return (npz.read_tile if kind == "tile" else npz.read_layout)(path)


def with_configs(graph, ids, runtime_ns=None):
  """The graph with the given configurations, possibly again and again."""
  configs = graph.configs
  runtime_ns = configs.runtime_ns[ids] if runtime_ns is None else runtime_ns
  if isinstance(configs, TileConfigs):
    configs = TileConfigs(configs.config_feat[ids], runtime_ns, configs.normalizer_ns[ids])
  else:
    configs = LayoutConfigs(configs.rows, configs.node_group, configs.group_row[ids], runtime_ns)
  return dataclasses.replace(graph, configs=configs)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_agrees_with_the_results_of_the_command(jobs, kind):
  """Other devices and shapes round differently: only near ties may change places."""
  workdir = jobs.workdir(f"{kind}_whole")
  results = submission.read_results(workdir / "results.csv")
  graph = graph_of(kind)
  order, scores = tpugraphs_jax.rank(workdir, graph)
  assert scores.shape == (len(graph.configs),) and scores.dtype == np.float32
  np.testing.assert_array_equal(order, np.argsort(scores, kind="stable"))
  written = results[f"{COLLECTIONS[kind]}:{graph.name}"]
  np.testing.assert_array_equal(np.sort(written), np.arange(len(scores)))
  assert np.ptp(scores) > 0
  np.testing.assert_allclose(scores[written], scores[order], atol=1e-4 * np.ptp(scores))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_configurations_stay_in_file_order(jobs, kind):
  """Also across chunks: a configuration's score must not depend on its place."""
  graph = graph_of(kind)
  order, scores = tpugraphs_jax.rank(
      jobs.workdir(f"{kind}_whole"), with_configs(graph, np.full(230, 3)))
  assert len(np.unique(scores)) == 1
  np.testing.assert_array_equal(order, np.arange(230))


@pytest.mark.parametrize("kind", KINDS)
def test_labels_have_no_influence_and_one_configuration_is_enough(jobs, kind):
  workdir, graph = jobs.workdir(f"{kind}_whole"), graph_of(kind, "valid")
  assert graph.configs.is_labelled
  ids = np.arange(9)
  labelled = tpugraphs_jax.rank(workdir, with_configs(graph, ids))
  unlabelled = tpugraphs_jax.rank(workdir, with_configs(graph, ids, np.zeros(9, np.int64)))
  np.testing.assert_array_equal(labelled, unlabelled)
  order, scores = tpugraphs_jax.rank(workdir, with_configs(graph, ids[4:5]))
  np.testing.assert_array_equal(order, [0])
  np.testing.assert_allclose(scores[0], labelled[1][4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, other", [("tile", "layout"), ("layout", "tile")])
def test_a_graph_of_another_kind_is_refused(jobs, kind, other):
  workdir = jobs.workdir(f"{kind}_whole")
  with pytest.raises(ValueError, match="the model ranks"):
    tpugraphs_jax.rank(workdir, graph_of(other))
  with pytest.raises(ValueError, match="NoneType; the model ranks"):
    tpugraphs_jax.rank(workdir, dataclasses.replace(graph_of(kind), configs=None))


def test_statistics_of_another_run_are_refused(jobs, tmp_path):
  workdir = shutil.copytree(jobs.workdir("tile_whole"), tmp_path / "copy")
  path = workdir / ranker_lib.TRANSFORMS_FILE
  found = features.load(path)
  released = found["node/released"]
  found["node/released"] = dataclasses.replace(released, scale=2 * released.scale)
  features.save(path, found)
  with pytest.raises(ValueError, match="another run"):
    Ranker.load(workdir)


def test_a_ranker_is_kept_until_there_is_another_checkpoint(jobs, tmp_path, monkeypatch):
  workdir = shutil.copytree(jobs.workdir("tile_whole"), tmp_path / "copy")
  made, ranker = [], Ranker.load(workdir)
  monkeypatch.setattr(ranker_lib.Ranker, "load", lambda folder: made.append(folder) or ranker)
  monkeypatch.setattr(ranker, "rank", lambda graph: graph.name)
  for _ in range(3):
    tpugraphs_jax.rank(workdir, graph_of("tile"))
  assert len(made) == 1
  (workdir / "checkpoints" / "save_99").mkdir()
  tpugraphs_jax.rank(str(workdir), graph_of("tile"))
  assert len(made) == 2


def test_a_folder_without_a_model_says_what_is_missing(jobs, tmp_path):
  with pytest.raises(FileNotFoundError, match="model.npz is missing: name a folder that"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))
  whole = jobs.workdir("tile_whole")
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(FileNotFoundError, match="config.json is missing: --workdir must name"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))
  (tmp_path / "config.json").write_text('{"config": ')
  with pytest.raises(ValueError, match="config.json is damaged"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))
  shutil.copy(whole / "config.json", tmp_path)
  with pytest.raises(FileNotFoundError, match="holds no checkpoint: train first"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))
  shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints", dirs_exist_ok=True)
  with pytest.raises(FileNotFoundError, match="features.json is missing"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))


def test_scores_that_are_not_finite_are_refused(jobs):
  ranker = Ranker.load(jobs.workdir("tile_whole"))
  ranker.params = jax.tree.map(lambda leaf: np.full_like(leaf, np.inf), ranker.params)
  with pytest.raises(FloatingPointError, match="scores are not finite, because"):
    ranker.rank(graph_of("tile"))


def load(jobs, changes):
  config = ml_collections.ConfigDict(ranker_lib.config_of(jobs.workdir("tile_whole")))
  config.update_from_flattened_dict(changes)
  return Ranker.load(jobs.workdir("tile_whole"), config.to_dict()).params


@pytest.mark.parametrize("field, value", [
    ("model.hidden_dim", 16), ("model.name", "LateJoinSAGE"), ("data.pad_value", -1),
    ("loss.temperature", 2.0), ("seed", 7),
])
def test_a_checkpoint_of_another_config_is_refused(jobs, field, value):
  with pytest.raises(ValueError, match=f"of another config: {field} is .* there and .* here"):
    load(jobs, {field: value})


def test_what_a_model_does_not_depend_on_may_change(jobs):
  free = {"eval.configs": 7, "eval.graphs": 2, "train.epochs": 50, "data.skip_bad_files": True,
          "batch.config_chunk": 3,
          "data.loader_threads": 2, "data_root": "/elsewhere", "profile_steps": "1:2"}
  expected, found = load(jobs, {}), load(jobs, free)
  np.testing.assert_array_equal(found["op_embedding"]["table"]["embedding"],
                                expected["op_embedding"]["table"]["embedding"])


def test_saved_statistics_are_those_of_the_training_split(jobs):
  ranker = Ranker.load(jobs.workdir("tile_whole"))
  job = job_lib.Job.of(ml_collections.ConfigDict(ranker_lib.config_of(jobs.workdir("tile_whole"))))
  files = npz.split_files(jobs.data_root, "tile:xla", "train")
  graphs = job_lib.trainable(job, [npz.read_tile(path) for path in files])
  job.fit(graphs)
  for name, transform in job.ranker.transforms.items():
    found = ranker.transforms[name]
    assert isinstance(found, features.Transform)
    for field in ("kept", "log", "offset", "scale"):
      np.testing.assert_array_equal(getattr(found, field), getattr(transform, field))
