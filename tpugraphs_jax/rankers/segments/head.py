"""Batches of readouts that are known already: the head alone is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Budget, Slate
from tpugraphs_jax.data.plan import Draw, draw_slates
from tpugraphs_jax.data.sampling import ConfigSampler
from tpugraphs_jax.graph import LayoutConfigs


@dataclasses.dataclass(frozen=True, eq=False)
class HeadGraph:
  """Refreshed readouts of some configurations of a graph."""

  name: str
  configs: LayoutConfigs  # the refreshed ones
  total: np.ndarray  # [configs, P] float32 sums over all segments, memory-mapped
  segments: int
  sizes: dict[str, int]  # as for any graph of a plan: it takes one row per batch


class HeadBatch(NamedTuple):
  """G slates of known totals."""

  total: np.ndarray  # [G, C, P] float32
  segments: np.ndarray  # [G] int32
  target: np.ndarray  # [G, C] float32, larger = slower
  config_mask: np.ndarray  # [G, C] bool


class HeadBatcher:
  """Batches of `HeadGraph`s, which need no preparation."""

  def draw(
      self, graphs: Sequence[HeadGraph], sampler: ConfigSampler
  ) -> Draw:
    """Draws slates of these graphs."""
    return draw_slates(graphs, sampler)

  def assemble(
      self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> HeadBatch:
    """A batch of at most `graphs` slates with `configs` configurations each."""
    del budget  # of nodes; a batch has none
    width = slates[0].graph.total.shape[1]
    total = np.zeros((graphs, configs, width), np.float32)
    segments = np.ones(graphs, np.int32)
    for i, slate in enumerate(slates):
      total[i, : len(slate.config_ids)] = slate.graph.total[slate.config_ids]
      segments[i] = slate.graph.segments
    return HeadBatch(total, segments, *batching.targets(slates, graphs, configs))

  def align(self, batches: Sequence[HeadBatch]) -> Sequence[HeadBatch]:
    """The batches themselves: all are of one structure."""
    return batches
