"""A network declares what it looks at; its family refuses what does not go with it."""

import itertools

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import families
import parts
import pytest
import random_graphs

from tpugraphs_jax import registry
from tpugraphs_jax.rankers import base, scorer as scorer_lib
from tpugraphs_jax.rankers.layout.res_model import ResModel
from tpugraphs_jax.run.job import Job


class Whole(base.Network):
  """All that a network needs."""

  width: int = 3

  def embed(self, batch, *, train=False):
    return jnp.ones((*batch.target.shape, self.width))

  def score(self, readout):
    return readout.sum(axis=-1)


class WithoutScore(base.Network):

  def embed(self, batch, *, train=False):
    return None


class WithoutEmbed(base.Network):

  def score(self, readout):
    return readout


class Blind(nn.Module):
  """Has both methods, but is no network of the project."""

  def embed(self, batch, *, train=False):
    return None

  def score(self, readout):
    return readout


_NUMBERS = itertools.count()


def register(thing):
  """Registers a ranker of tiles under a name of its own."""
  name = f"Mine{next(_NUMBERS)}"
  base.TILE_MODELS.register(name)(thing)
  return name


@pytest.mark.parametrize("model, complaint", [
    (WithoutScore, "'score'"), (WithoutEmbed, "'embed'"), (Blind, "Blind"),
    (lambda: "no module", "type str"),
])
def test_a_network_without_what_a_ranker_needs_is_refused(model, complaint):
  with pytest.raises(ValueError, match=complaint) as error:
    base.create_network("tile", register(model))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind, names", [
    ("tile", {"EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN", "MLP"}),
    ("layout", {"SAGE", "ResModel"}),
])
def test_the_projects_own_models_are_registered(kind, names):
  assert names <= set(base.MODELS[kind])
  for name in names:
    base.create_network(kind, name)
  with pytest.raises(ValueError, match="model.name is 'Nope', expected one of .*extensions"):
    base.create_network(kind, "Nope")


class SlateMean(Whole):
  """Scores relative to the slate: the simplest network that compares configurations."""

  compares_configs = True


class Attentive(Whole):
  """A readout depends on nodes at any distance."""

  sees_whole_graph = True


class Integers(Whole):
  """Layout configurations are embedded as integers."""

  embeds_integers = True


ALIKE = {"batch.configs": 16, "eval.configs": 16}


@pytest.mark.parametrize("network, variant, changes, complaint", [
    (SlateMean(), "full,ci", {"batch.configs": 16, "eval.configs": 100}, "eval.configs"),
    (SlateMean(), "full,ci", ALIKE | {"batch.config_chunk": 4}, "config_chunk"),
    (SlateMean(), "gst_ed,ci", ALIKE, "history"), (Attentive(), "gst_ed,ci", ALIKE, "history"),
    (Integers(), "full,ci", {"data.config_transform": "minmax"}, "config_transform"),
    (ResModel(dropout="dropout"), "gst_ed,ci", {}, "blocks"),
    (ResModel(dropout="backpropdropout"), "gst_ed,ci", {}, "blocks"),
])
def test_what_does_not_go_together_is_refused(network, variant, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    families.make("layout", network, variant, **changes)


@pytest.mark.parametrize("network, variant, changes", [
    (Whole(), "gst_ed,ci", {"batch.configs": 16, "eval.configs": 100}),
    (SlateMean(), "full,ci", ALIKE), (SlateMean(), "gst,ci", ALIKE),
    (Attentive(), "full,ci", {"batch.config_chunk": 4}), (Attentive(), "gst,ci", ALIKE),
    (ResModel(dropout="backpropdropout"), "full,ci", {"batch.config_chunk": 4}),
])
def test_everything_else_is_allowed(network, variant, changes):
  families.make("layout", network, variant, **changes)


def test_a_run_with_such_a_network_is_refused_before_data_is_read():
  with pytest.raises(ValueError, match="eval.configs"):
    config = parts.config_of("tile", **{"data_root": "/nowhere", "eval.configs": 64})
    with config.unlocked():
      config.model = {"name": register(SlateMean), "width": 3}
    Job.of(config)


@pytest.mark.parametrize("network, expected", [(Whole(), [[0]]), (SlateMean(), [[0] * 9])])
def test_equal_configurations_are_scored_once_unless_a_network_compares_them(network, expected):
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=5, edges=4, configs=1)
  family = families.make("tile", network, **{"batch.configs": 6, "eval.configs": 6})
  asked = []

  def scores(params, graphs, config_ids, *, progress=False):
    asked.extend(ids.tolist() for ids in config_ids)
    return [np.zeros(len(ids), np.float32) for ids in config_ids]

  (found,) = family.scorer_of(scores)(None, [graph], [np.zeros(9, np.int64)], permutations=1)
  assert asked == expected and found.shape == (9,)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 12, 17])
def test_every_chunk_of_a_whole_slate_has_its_size(count):
  """The last chunk is filled up with the first configurations, whose scores count once."""
  ids = np.arange(100, 100 + count)
  parts_of = scorer_lib.chunks(ids, 6, whole=True)
  sizes = {len(chunk) for chunk, _ in parts_of}
  assert sizes == ({6} if count >= 6 else {count})
  kept = [chunk[:wanted] for chunk, wanted in parts_of]
  np.testing.assert_array_equal(np.concatenate(kept), ids)
  for chunk, _ in parts_of:
    assert len(set(chunk.tolist())) == len(chunk)
  plain = scorer_lib.chunks(ids, 6, whole=False)
  np.testing.assert_array_equal(np.concatenate([chunk for chunk, _ in plain]), ids)


def test_a_taken_name_is_refused_unless_it_is_the_same_thing():
  table = registry.Registry("model.name")
  table.register("Whole")(Whole)
  table.register("Whole")(Whole)  # its module was loaded anew
  with pytest.raises(ValueError, match="model.name 'Whole' is registered already"):
    table.register("Whole")(SlateMean)


def module(folder, name, text):
  (folder / f"{name}.py").write_text(text)
  return folder


@pytest.mark.parametrize("text, reason", [
    (None, "No module named 'absent_module'"), ("1 / 0", "ZeroDivisionError"),
    ("import no_such_package", "No module named 'no_such_package'"), ("def f(:", "SyntaxError"),
])
def test_a_module_that_cannot_be_imported_takes_one_line(text, reason, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  name = "absent_module" if text is None else f"broken_{abs(hash(text)) % 10**6}"
  if text is not None:
    module(tmp_path, name, text)
  config = parts.config_of("tile")
  with config.unlocked():
    config.extensions = (name,)
  with pytest.raises(ValueError, match=f"extensions names the module '{name}'") as error:
    Job.of(config)
  assert reason in str(error.value) and "\n" not in str(error.value)
  assert "PYTHONPATH" in str(error.value)


def test_a_module_is_found_again_where_it_was(tmp_path, monkeypatch):
  module(tmp_path, "my_found_module", "MARK = 3\n")
  monkeypatch.chdir(tmp_path)
  (recorded,) = registry.import_extensions(("my_found_module",))
  assert recorded == f"my_found_module@{tmp_path}"
  monkeypatch.chdir("/")
  monkeypatch.delitem(__import__("sys").modules, "my_found_module")
  assert registry.import_extensions((recorded,)) == (recorded,)
  assert registry.names_of((recorded, "other")) == ("my_found_module", "other")
