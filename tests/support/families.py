"""Ranker families around any network, with the fields of a config of the project."""

from __future__ import annotations

from typing import Any

from tests.support import parts
from tpugraphs_jax import rankers
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.family import Family, LayoutFamily, TileFamily
from tpugraphs_jax.rankers.segments.family import Segments

IDENTITY = lambda rows: rows


def make(kind: str, network: base.Network, variant: str = "ci", **changes: Any) -> Family:
  """The family of a network; configurations reach the network as they are.

  Args:
    kind: `tile` or `layout`.
    network: of that kind.
    variant: of the config.
    **changes: fields of the config (`**{"eval.graphs": 4}`).
  """
  config = parts.config_of(kind, variant, **changes)
  default = TileFamily if kind == "tile" else LayoutFamily
  family = (network.family or default)(network, config)
  family = Segments(family) if config.segments else family
  family.config_transform = IDENTITY
  return family


def of_config(kind: str, variant: str = "ci", **changes: Any) -> Family:
  """The family that a config of the project names, with configurations as they are."""
  family = rankers.create(parts.config_of(kind, variant, **changes))
  family.config_transform = IDENTITY
  return family


def scorer_of(family, run):
  """`Family.scores` of a family whose method `run_network` is the given function."""
  family.run_network = run
  return family.scores
