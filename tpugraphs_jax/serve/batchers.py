"""From a config to the batcher of its ranker."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from tpugraphs_jax.data import batching, reduction
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.rankers.base import Sees
from tpugraphs_jax.rankers.layout.batcher import LayoutBatcher
from tpugraphs_jax.rankers.segments.batches import SegmentBatcher
from tpugraphs_jax.rankers.tables.batcher import TableBatcher
from tpugraphs_jax.rankers.tile.batcher import TileBatcher
from tpugraphs_jax.serve.models import segments_of

Batcher = TileBatcher | LayoutBatcher | SegmentBatcher | TableBatcher


def create_batcher(
    config: Mapping[str, Any], sees: Sees, config_transform: Transform
) -> Batcher:
  """What prepares graphs and makes batches.

  Args:
    config: nested fields, see `configs/`.
    sees: what the ranker looks at.
    config_transform: of configurations.
  """
  data = config["data"]
  slots = data["neighbour_slots"]
  slots = batching.slots_of(jax.default_backend()) if slots < 0 else slots
  virtual = reduction.Options(
      virtual_node=data["virtual_node"], cluster_nodes=data["cluster_nodes"])
  if config["task"] == "tile":
    return TileBatcher(
        config_transform, slots, virtual, tuple(data["config_features"]), sees.distinct)
  part = dataclasses.replace(
      virtual, reduction=data["graph_reduction"], hops=data["reduction_hops"],
      direction=data["reduction_direction"], induced=data["reduction_induced"])
  if sees.tables:
    return TableBatcher(slots, part, data["pair_hops"], data["tile_padding"])
  layout = LayoutBatcher(
      config_transform, slots, hops=sees.hops, reduction=part,
      block_nodes=config["batch"]["keep_nodes"] if sees.blocks != "never" else 0)
  segments = segments_of(config)
  if segments is None:
    return layout
  return SegmentBatcher(
      layout, segments["partition"], segments["max_nodes"], segments["fresh"],
      segments["recompute"])
