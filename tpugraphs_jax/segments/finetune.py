"""Head fine-tuning (+F): the backbone is frozen, the head learns on exact readouts.

Every readout of the training graphs is computed once. The head sees only their
sums over a graph's segments, so these are kept: one entry per configuration
instead of one per segment.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.graph import LayoutConfigs
from tpugraphs_jax.segments.batching import SegmentedGraph
from tpugraphs_jax.segments.model import SegmentModel
from tpugraphs_jax.segments.score import SegmentScorer
from tpugraphs_jax.train import parallel


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


def refresh(
    scorer: SegmentScorer, params: Any, graphs: Sequence[SegmentedGraph],
    config_ids: Sequence[np.ndarray], folder: Path,
) -> list[HeadGraph]:
  """Computes the totals of the given configurations with the given parameters.

  Args:
    scorer: scores segments.
    params: of the trained model.
    graphs: training graphs.
    config_ids: `[n]` configuration numbers of each.
    folder: for the file of totals; made when missing.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"totals_{parallel.process_index()}.npy"
  first = np.cumsum([0] + [len(ids) for ids in config_ids])
  logging.info("refreshing the readouts of %d configurations of %d graphs", first[-1], len(graphs))
  totals = None
  for number, start, total in scorer.totals(params, graphs, config_ids, progress=True):
    if totals is None:
      totals = np.lib.format.open_memmap(
          path, "w+", np.float32, shape=(int(first[-1]), total.shape[1]))
    row = first[number] + start
    totals[row : row + len(total)] = total
  return [
      HeadGraph(graph.name, graph.configs.subset(ids), totals[start : start + len(ids)],
                len(graph.segments), {"nodes": 1})
      for graph, ids, start in zip(graphs, config_ids, first)
  ]


def assemble(slots: Sequence[Slate], *, graphs: int, configs: int) -> HeadBatch:
  """A batch of at most `graphs` slots with `configs` configurations each."""
  width = slots[0].graph.total.shape[1]
  total = np.zeros((graphs, configs, width), np.float32)
  segments = np.ones(graphs, np.int32)
  for i, slot in enumerate(slots):
    total[i, : len(slot.config_ids)] = slot.graph.total[slot.config_ids]
    segments[i] = slot.graph.segments
  return HeadBatch(total, segments, *batching.targets(slots, graphs, configs))


def head_optimizer(
    optimizer: optax.GradientTransformation, model: SegmentModel
) -> optax.GradientTransformation:
  """Applies `optimizer` to the parameters that `model.head` uses; the others stay."""
  # Their names do not depend on the width of the readout.
  total, segments = jnp.zeros((1, 1, 1)), jnp.ones(1, jnp.int32)
  init = lambda: model.init(jax.random.key(0), total, segments, method="head")
  names = set(jax.eval_shape(init).get("params", {}))
  label = lambda params: {k: "head" if k in names else "frozen" for k in params}
  return optax.partition({"head": optimizer, "frozen": optax.set_to_zero()}, label)


class FrozenScorer:
  """Scores the same graphs again and again while only the head changes.

  Args:
    scorer: computes the totals, once.
  """

  def __init__(self, scorer: SegmentScorer):
    self._scorer = scorer
    self._totals: list[np.ndarray] | None = None

  def scores(
      self, params: Any, graphs: Sequence[SegmentedGraph], *,
      config_ids: Sequence[np.ndarray], progress: bool = False,
  ) -> list[np.ndarray]:
    """As `SegmentScorer.scores`; graphs and configurations must always be the same."""
    if self._totals is None:
      parts = [[] for _ in graphs]
      for number, _, total in self._scorer.totals(params, graphs, config_ids, progress=progress):
        parts[number].append(total)
      self._totals = [np.concatenate(part) for part in parts]
    return [self._scorer.head(params, graph, total)
            for graph, total in zip(graphs, self._totals)]
