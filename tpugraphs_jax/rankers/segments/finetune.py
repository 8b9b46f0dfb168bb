"""Head fine-tuning (+F): the backbone is frozen, the head learns on exact readouts.

Every readout of the training graphs is computed once. The head sees only their
sums over a graph's segments, so these are kept: one entry per configuration
instead of one per segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpugraphs_jax import parallel
from tpugraphs_jax.rankers.segments.batches import SegmentedGraph
from tpugraphs_jax.rankers.segments.head import HeadGraph
from tpugraphs_jax.rankers.segments.model import SegmentModel
from tpugraphs_jax.rankers.segments.score import SegmentScorer


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
    """Scores `[n]` float32 of each graph; graphs and configurations must always be the same."""
    if self._totals is None:
      parts = [[] for _ in graphs]
      for number, _, total in self._scorer.totals(params, graphs, config_ids, progress=progress):
        parts[number].append(total)
      self._totals = [np.concatenate(part) for part in parts]
    return [self._scorer.head(params, graph, total)
            for graph, total in zip(graphs, self._totals)]
