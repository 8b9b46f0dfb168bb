"""A ranker declares what it sees; what does not go with it is refused, in one place."""

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import parts
import pytest
import random_graphs

from tpugraphs_jax import registry
from tpugraphs_jax.data import batching
from tpugraphs_jax.rankers import base, scorer as scorer_lib
from tpugraphs_jax.rankers.base import Sees, Use
from tpugraphs_jax.run.jobs import Job


class Whole(base.Ranker):
  """All that a ranker needs."""

  width: int = 3

  def embed(self, batch, *, train=False):
    return jnp.ones((*batch.target.shape, self.width))

  def score(self, readout):
    return readout.sum(axis=-1)


class WithoutScore(base.Ranker):

  def embed(self, batch, *, train=False):
    return None


class WithoutEmbed(nn.Module):

  def score(self, readout):
    return readout


class Blind(nn.Module):
  """Has both methods, but does not say what it sees."""

  def embed(self, batch, *, train=False):
    return None

  def score(self, readout):
    return readout


@pytest.mark.parametrize("model, complaint", [
    (WithoutScore(), "has no method 'score'"), (WithoutEmbed(), "has no method 'embed'"),
    (Blind(), "does not say what it sees"), (lambda batch: batch, "is of type function, expected"),
])
def test_a_model_without_what_a_ranker_needs_is_refused(model, complaint):
  with pytest.raises(ValueError, match=f"model Mine {complaint}") as error:
    base.check(model, "Mine")
  assert "\n" not in str(error.value)


def test_a_declared_ranker_is_taken_as_it_is():
  model = Whole()
  assert base.check(model, "Mine") is model
  assert model.sees == Sees() and model.sees.hops == 0


@pytest.mark.parametrize("kind, names", [
    ("tile", {"EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN", "MLP"}),
    ("layout", {"SAGE", "ResModel"}),
])
def test_the_projects_own_models_are_registered(kind, names):
  assert names <= set(base.MODELS[kind])
  for name in names:
    base.create(kind, name)
  with pytest.raises(ValueError, match="model.name is 'Nope', expected one of .*extensions"):
    base.create(kind, "Nope")


@pytest.mark.parametrize("options, complaint", [
    (dict(blocks="sometimes"), "blocks is 'sometimes', expected one of never, training, always"),
    (dict(hops=-1), "hops is -1"),
])
def test_an_impossible_declaration_is_refused(options, complaint):
  with pytest.raises(ValueError, match=complaint):
    Sees(**options)


SINGLE, SLATES = Sees(hops=2), Sees(slates=True)
ALIKE = dict(slate=16, scored=16)


@pytest.mark.parametrize("sees, use, complaint", [
    (SLATES, Use(slate=16, scored=100), "eval.configs is 100 and batch.configs is 16, but"),
    (SLATES, Use(**ALIKE, chunk=4), "batch.config_chunk is 4, but"),
    (SLATES, Use(**ALIKE, segments=True, history=True), "looks across configurations: the history"),
    (Sees(whole_graph=True), Use(**ALIKE, segments=True, history=True),
     "looks at the whole graph: the history"),
    (Sees(blocks="training"), Use(**ALIKE, segments=True), "segments take the place of blocks"),
    (Sees(integers=True), Use(**ALIKE, config_transform="minmax"),
     "data.config_transform is 'minmax', but this model embeds the integers"),
    (Sees(blocks="always"), Use(**ALIKE, segments=True), "segments take the place of blocks"),
])
def test_what_does_not_go_together_is_refused(sees, use, complaint):
  with pytest.raises(ValueError, match=complaint):
    base.check_use(sees, use)


@pytest.mark.parametrize("sees, use", [
    (SINGLE, Use(slate=16, scored=100, chunk=4, segments=True, history=True)),
    (SLATES, Use(**ALIKE)), (SLATES, Use(**ALIKE, segments=True)),
    (Sees(whole_graph=True), Use(slate=16, scored=100, chunk=4)),
    (Sees(whole_graph=True), Use(**ALIKE, segments=True)),
    (Sees(blocks="training"), Use(slate=16, scored=100, chunk=4)),
])
def test_everything_else_is_allowed(sees, use):
  base.check_use(sees, use)


class SlateMean(Whole):
  """Scores relative to the slate: the simplest model that looks across configurations."""

  @property
  def sees(self):
    return Sees(slates=True)


@pytest.fixture
def slates_model(monkeypatch):
  monkeypatch.setattr(base, "create", lambda kind, name, **options: SlateMean())


@pytest.mark.parametrize("changes, complaint", [
    ({"eval.configs": 64}, "eval.configs is 64 and batch.configs is 6"),
    ({"batch.config_chunk": 3, "eval.configs": 6}, "batch.config_chunk is 3"),
])
def test_a_run_with_such_a_model_is_refused_before_data_is_read(slates_model, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    parts.make("tile", **{"data_root": "/nowhere", **changes})


class Recording:
  """A scorer that notes what it was asked for."""

  def __init__(self):
    self.ids = []

  def scores(self, params, graphs, *, config_ids, progress=False):
    self.ids += [ids.tolist() for ids in config_ids]
    return [np.zeros(len(ids), np.float32) for ids in config_ids]


def test_duplicates_stay_where_a_model_looks_across_them(slates_model):
  rng = np.random.default_rng(0)
  raw = random_graphs.tile_graph(rng, nodes=5, edges=4, configs=1)
  graph = batching.prepare(raw, raw.node_feat)
  ranker, scorer = parts.make("tile", **{"eval.configs": 6}).ranker, Recording()
  ranker.score(scorer, None, [graph], [np.zeros(9, np.int64)])
  assert scorer.ids == [[0] * 9]


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
