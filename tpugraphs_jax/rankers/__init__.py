"""Ranker families, one folder or file each; `base` and `family` have the base classes.

  tile       networks of the official baseline for fused kernels
  layout     networks for whole programs: the official ResModel, GraphSAGE
  segments   Graph Segment Training, around a family for whole programs
  tables     score tables: the network runs once per program, scores are sums of table entries
  systems    published systems, one file each

`scorer` runs networks on graphs of any size. `ranker` is a network with its
features and weights; `model_file` reads and writes it. `official_weights` converts weights of the
official models.
"""

from __future__ import annotations

from collections.abc import Sequence

# Importing a module of networks registers them.
from tpugraphs_jax.rankers import base, systems, tile
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.family import Family, LayoutFamily, TileFamily
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.rankers.segments.family import Segments
from tpugraphs_jax.rankers.tables import network, times, traffic


def create(config: Config, unscaled: Sequence[str] = ()) -> Family:
  """The ranker family of a config.

  Args:
    config: see `rankers.config`.
    unscaled: blocks of node features that no transform changes.

  Raises:
    ValueError: as `base.create_network`, or for fields that the network cannot work with.
  """
  model = config.model
  ranker_network = base.create_network(config.kind, model.name, **model.given)
  default = TileFamily if config.kind == "tile" else LayoutFamily
  family = (ranker_network.family or default)(ranker_network, config, unscaled)
  if config.segments is None:
    return family
  if not isinstance(family, LayoutFamily):
    raise ValueError(
      f"model {model.name} is of the family {type(family).__name__}, expected "
      "one of family.LayoutFamily: others cannot be trained in segments"
    )
  return Segments(family)
