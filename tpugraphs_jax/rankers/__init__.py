"""Ranker families, each in a folder of its own; `base` says what a family is.

  tile       networks of the official baseline for fused kernels
  layout     networks for whole programs: the official ResModel, GraphSAGE
  segments   Graph Segment Training, around a family of whole programs
  tables     costs of choices are looked up: the network runs once per program
  composed   the published systems as options of one network

`whole` has what all families share that see whole kernels or programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Importing a module of networks registers them.
from tpugraphs_jax.rankers import base, whole
from tpugraphs_jax.rankers.composed import edges, ranker
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.rankers.segments.family import Segments
from tpugraphs_jax.rankers.tables import network, traffic
from tpugraphs_jax.rankers.tile import networks


def create(config: Mapping[str, Any], unscaled: Sequence[str] = ()) -> base.Family:
  """The ranker family that a config names.

  Args:
    config: nested fields, see `configs/`.
    unscaled: blocks of node features that reach the network as they are.

  Raises:
    ValueError: see `base.create_network`; or fields that the network cannot work with.
  """
  kind = "tile" if config["task"] == "tile" else "layout"
  options = dict(config["model"])
  ranker_network = base.create_network(kind, options.pop("name"), **options)
  default = whole.Kernels if kind == "tile" else whole.Programs
  family = (ranker_network.family or default)(ranker_network, config, unscaled)
  return Segments(family) if config["task"] == "segments" else family
