"""Ensembles: averages of the scores of several trained rankers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os

import numpy as np
import scipy

from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.rankers import ranker


def min_max(scores: np.ndarray) -> np.ndarray:
  """Scores `[C]` scaled to [0, 1]; zeros if all are equal (5th place)."""
  width = scores.max() - scores.min()
  return (scores - scores.min()) / width if width else np.zeros(len(scores))


# Functions of scores `[C]`, applied before the average over rankers (`mean`: 1st, 2nd and 10th
# place). With `rank`, equal scores share their mean rank, counted from 1.
COMBINATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
  "mean": lambda scores: scores,
  "min_max": min_max,
  "rank": lambda scores: scipy.stats.rankdata(scores),
}


class Ensemble:
  """Rankers of one collection whose scores are averaged, graph by graph.

  Args:
    places: folders or model files, see `ranker.load`.
    combine: one of `COMBINATIONS`: the average of scores, of scores scaled to [0, 1] per graph,
      or of ranks.

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
    self.rankers = [ranker.load(place) for place in places]
    self._combine = COMBINATIONS[combine]
    names = {str(place): r.collection.name for place, r in zip(places, self.rankers)}
    if len(set(names.values())) > 1:
      text = ", ".join(f"{place} is of {name}" for place, name in names.items())
      raise ValueError(f"an ensemble takes models of one collection: {text}")
    self.collection = self.rankers[0].collection

  def __repr__(self) -> str:
    return f"<Ensemble of {len(self.rankers)} rankers of {self.collection.name}>"

  def scores(
    self,
    graphs: Sequence[OpGraph],
    config_ids: Sequence[np.ndarray] | None = None,
    *,
    progress: bool = False,
  ) -> list[np.ndarray]:
    """Combined scores of configurations of each graph, `[n]` float64, larger = slower.

    Args:
      graphs: with configurations.
      config_ids: `[n]` int64 for each graph; all configurations in file order unless given.
      progress: shows a bar for each ranker.
    """
    by_ranker = [ranker.scores(graphs, config_ids, progress=progress) for ranker in self.rankers]
    return [
      np.mean([self._combine(scores.astype(np.float64)) for scores in of_graph], axis=0)
      for of_graph in zip(*by_ranker)
    ]

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Order `[C]` int64, fastest first, and scores `[C]` float64 of one graph."""
    (scores,) = self.scores([graph])
    return np.argsort(scores, kind="stable"), scores
