"""Networks by name, what they declare, and what their families refuse."""

import itertools

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import families, parts, random_graphs
from tpugraphs_jax import rankers
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.family import Family
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.rankers.layout.res_model import ResModel


class Whole(base.Network):
  """The methods that every network needs."""

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
  """Has both methods, but is no `Network`."""

  def embed(self, batch, *, train=False):
    return None

  def score(self, readout):
    return readout


_NUMBERS = itertools.count()


def register(thing):
  """Registers a ranker of tiles under a new name, which it returns."""
  name = f"Mine{next(_NUMBERS)}"
  base.TILE_MODELS.register(name)(thing)
  return name


@pytest.mark.parametrize(
  "model, complaint",
  [
    (WithoutScore, "'score'"),
    (WithoutEmbed, "'embed'"),
    (Blind, "Blind"),
    (lambda: "no module", "type str"),
  ],
)
def test_a_network_without_what_a_ranker_needs_is_refused(model, complaint):
  with pytest.raises(ValueError, match=complaint) as error:
    base.create_network("tile", register(model))
  assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
  "network, variant, changes, complaint",
  [
    (SlateMean(), "full,ci", ALIKE | {"batch.config_chunk": 4}, "config_chunk"),
    (SlateMean(), "gst_ed,ci", ALIKE, "history"),
    (Attentive(), "gst_ed,ci", ALIKE, "history"),
    (Integers(), "full,ci", {"data.config_transform": "minmax"}, "config_transform"),
    (ResModel(dropout="dropout"), "gst_ed,ci", {}, "set model.dropout"),
    (ResModel(dropout="backpropdropout"), "gst_ed,ci", {}, "set model.dropout"),
  ],
)
def test_networks_and_options_that_exclude_each_other_are_refused(
  network, variant, changes, complaint
):
  with pytest.raises(ValueError, match=complaint):
    families.make("layout", network, variant, **changes)


class Alone(Family):
  """A family that is not made of whole programs."""


class Apart(Whole):
  """A network with a family of its own."""

  family = Alone


def test_a_family_that_is_not_of_programs_is_refused_in_segments():
  base.LAYOUT_MODELS.register("Apart")(Apart)
  config = parts.config_of("layout", "gst_ed,ci", model__name="Apart")
  with pytest.raises(ValueError, match="Alone"):
    rankers.create(config)


@pytest.mark.parametrize(
  "network, variant, changes",
  [
    (Whole(), "gst_ed,ci", {"batch.configs": 16, "eval.configs": 100}),
    (SlateMean(), "full,ci", {"batch.configs": 16, "eval.configs": 100}),
    (SlateMean(), "full,ci", ALIKE),
    (SlateMean(), "gst,ci", ALIKE),
    (Attentive(), "full,ci", {"batch.config_chunk": 4}),
    (Attentive(), "gst,ci", ALIKE),
    (ResModel(dropout="backpropdropout"), "full,ci", {"batch.config_chunk": 4}),
  ],
)
def test_networks_and_options_that_go_together_are_accepted(network, variant, changes):
  families.make("layout", network, variant, **changes)


@pytest.mark.parametrize("network, expected", [(Whole(), [[0]]), (SlateMean(), [[0] * 9])])
def test_equal_configurations_are_scored_once_unless_a_network_compares_them(network, expected):
  graph = random_graphs.tile_graph(np.random.default_rng(0), nodes=5, edges=4, configs=1)
  family = families.make("tile", network, **{"batch.configs": 6, "eval.configs": 6})
  asked = []

  def run(params, graphs, config_ids):
    asked.extend(ids.tolist() for ids in config_ids)
    return [np.zeros(len(ids), np.float32) for ids in config_ids]

  (found,) = families.scorer_of(family, run)(None, [graph], [np.zeros(9, np.int64)], permutations=1)
  assert asked == expected and found.shape == (9,)


@pytest.mark.parametrize(
  "kind, name, options, complaint",
  [
    ("tile", "LateJoinSAGE", dict(width=3), "'width'"),  # made by functools.partial
    ("layout", "SAGE", dict(width=3), r"'width'.* config.model = {'name': 'SAGE'}"),
    ("layout", "GAT", {}, "ResModel"),
    *(("layout", "Fourth", {name: ()}, name) for name in ("edge_widths", "config_widths")),
    ("tile", "MLSys21", dict(width=6), "model.width is 6"),
    ("layout", "S2GNN", dict(width=5), "model.width"),
    ("layout", "S2GNN", dict(width=6, heads=4), "model.width"),
    ("layout", "Tenth", dict(width=6), "width 6, expected a multiple"),
    ("tile", "Tenth", dict(width=6), "width 6, expected a multiple"),
    ("tile", "Tenth", dict(width=8, mlp_widths=(8, 9)), "width 9, expected a multiple"),
  ],
)
def test_what_a_network_cannot_be_is_refused(kind, name, options, complaint):
  with pytest.raises(ValueError, match=complaint) as error:
    base.create_network(kind, name, **options)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "dropout, blocks", [("fullgraph", False), ("backpropdropout", True), ("dropout", True)]
)
def test_res_model_declares_its_hops_and_when_it_sees_blocks(dropout, blocks):
  model = base.create_network("layout", "ResModel", num_gnns=3, dropout=dropout)
  assert model.hops == 3 and (model.family is res_model.BlockFamily) is blocks


def test_a_registered_function_has_its_arguments_as_options():
  @base.LAYOUT_MODELS.register("wide")
  def wide(rounds: int = 2):
    return sage.SAGE(hidden_dim=512, num_gnns=rounds)

  assert base.create_network("layout", "wide", rounds=1).hops == 1
  with pytest.raises(ValueError, match="num_gnns"):
    base.create_network("layout", "wide", num_gnns=1)
