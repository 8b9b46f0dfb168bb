"""Several trained rankers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os

import numpy as np
from scipy import stats

from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.serve import ranker as ranker_lib


def min_max(scores: np.ndarray) -> np.ndarray:
  """Scores `[C]` brought to [0, 1]; zeros where all are equal (5th place)."""
  spread = scores.max() - scores.min()
  return (scores - scores.min()) / spread if spread else np.zeros(len(scores))


# Functions of scores `[C]` whose results are averaged over rankers (`mean`: 1st, 2nd and 10th
# place). Equal scores share their mean rank, counted from 1.
COMBINATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda scores: scores, "min_max": min_max, "rank": stats.rankdata}


class Ensemble:
  """Rankers of one collection whose scores are averaged, graph by graph.

  Args:
    places: folders or model files, see `serve.ranker.load`.
    combine: one of `COMBINATIONS`: the mean of the scores as they are, of scores
      brought to [0, 1] within a graph, or of ranks.

  Raises:
    ValueError: no ranker, an unknown combination, or rankers of different collections.

  Examples:
    >>> len(Ensemble(["layout-cpu-measured", "layout-cpu-measured"], combine="rank").rankers)
    2
  """

  def __init__(self, places: Sequence[str | os.PathLike[str]], *, combine: str = "mean"):
    if combine not in COMBINATIONS:
      raise ValueError(f"combine is {combine!r}, expected one of {', '.join(COMBINATIONS)}")
    if not places:
      raise ValueError("an ensemble needs at least one folder with a trained model")
    self.rankers = [ranker_lib.load(place) for place in places]
    self._combine = COMBINATIONS[combine]
    names = {str(place): r.collection.name for place, r in zip(places, self.rankers)}
    if len(set(names.values())) > 1:
      each = ", ".join(f"{place} is of {name}" for place, name in names.items())
      raise ValueError(f"an ensemble takes models of one collection: {each}")
    self.collection = self.rankers[0].collection

  def __repr__(self) -> str:
    return f"<Ensemble of {len(self.rankers)} rankers of {self.collection.name}>"

  def scores(
      self, graphs: Sequence[OpGraph], config_ids: Sequence[np.ndarray] | None = None, *,
      progress: bool = False,
  ) -> list[np.ndarray]:
    """Combined scores of configurations of each graph, `[n]` float64, larger = slower.

    Args:
      graphs: with configurations.
      config_ids: `[n]` int64 for each graph; all of them in file order unless given.
      progress: shows a bar for each ranker.
    """
    of_each = [ranker.scores(graphs, config_ids, progress=progress) for ranker in self.rankers]
    return [
        np.mean([self._combine(scores.astype(np.float64)) for scores in of_graph], axis=0)
        for of_graph in zip(*of_each)]

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Order `[C]` int64, fastest first, and scores `[C]` float64 of one graph."""
    (scores,) = self.scores([graph])
    return np.argsort(scores, kind="stable"), scores
