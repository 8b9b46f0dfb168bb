"""The project's rankers declare what they see, under the names that configs use."""

from __future__ import annotations

import functools

import pytest

from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.rankers.layout.res_model import BlockPrograms
from tpugraphs_jax.rankers import tile
from tpugraphs_jax.rankers.tile import LateJoin

TILE_NAMES = {
    "EarlyJoinSAGE": (tile.SAGE, True), "LateJoinSAGE": (tile.SAGE, False),
    "EarlyJoinResGCN": (tile.ResGCN, True), "LateJoinResGCN": (tile.ResGCN, False),
    "MLP": (tile.PooledMLP, False),
}


@pytest.mark.parametrize("name", TILE_NAMES)
def test_official_tile_names_say_where_the_configuration_is_joined(name):
  model = base.create_network("tile", name, hidden_dim=8)
  kind, early = TILE_NAMES[name]
  assert type(model) is kind and model.hidden_dim == 8
  assert model.early_join is early
  assert (model.family is LateJoin) is not early


@pytest.mark.parametrize("name", TILE_NAMES)
def test_the_join_that_a_name_says_is_no_option(name):
  with pytest.raises(ValueError, match=f"model {name} has no option 'early_join'; it has .*dtype"):
    base.create_network("tile", name, early_join=True)


@pytest.mark.parametrize("kind, name", [
    *(("tile", name) for name in TILE_NAMES), ("layout", "SAGE"), ("layout", "ResModel")])
def test_an_option_that_a_model_does_not_have_is_refused_with_those_it_has(kind, name):
  with pytest.raises(ValueError, match=rf"model {name} has no option 'width'; it has .*hidden_dim"):
    base.create_network(kind, name, width=3)


def test_an_unknown_name_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match="model.name is 'GAT', expected one of .*ResModel.*SAGE"):
    base.create_network("layout", "GAT")


@pytest.mark.parametrize("dropout, blocks", [
    ("fullgraph", False), ("backpropdropout", True), ("dropout", True)])
def test_res_model_declares_its_hops_and_when_it_sees_blocks(dropout, blocks):
  model = base.create_network("layout", "ResModel", num_gnns=3, dropout=dropout)
  assert type(model) is res_model.ResModel
  assert model.hops == 3 and (model.family is BlockPrograms) is blocks


def test_sage_declares_its_hops():
  model = base.create_network("layout", "SAGE", num_gnns=4)
  assert type(model) is sage.SAGE
  assert model.hops == 4 and model.embeds_integers


def test_a_registered_function_has_its_arguments_as_options():
  @base.LAYOUT_MODELS.register("wide")
  def wide(rounds: int = 2):
    return sage.SAGE(hidden_dim=512, num_gnns=rounds)

  assert base.create_network("layout", "wide", rounds=1).hops == 1
  with pytest.raises(ValueError, match="model wide has no option 'num_gnns'; it has rounds"):
    base.create_network("layout", "wide", num_gnns=1)


def test_a_registered_partial_keeps_what_it_sets():
  base.TILE_MODELS.register("mean")(functools.partial(tile.ResGCN, reduction="mean"))
  assert base.create_network("tile", "mean").reduction == "mean"
  with pytest.raises(ValueError, match="has no option 'reduction'"):
    base.create_network("tile", "mean", reduction="sum")
