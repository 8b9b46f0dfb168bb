"""Which configurations of a graph make a slate, and what the model should predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, TileConfigs

SAMPLINGS = ("uniform", "skewed", "uniform_replacement", "skewed_replacement", "close_runtimes")
GRAPH_SAMPLINGS = ("uniform", "sqrt", "proportional")
# Offset to add to a target so that it is proportional to the runtime. Ranks are not, and count
# as they are.
ORIGINS = {"official": 0.0, "ratio": 1.0, "rank": 0.0, "absolute": 0.0}
TARGETS = tuple(ORIGINS)
# Of slates of close runtimes (1st place of the competition): how many are, and how many
# slates long the window of sorted runtimes may be that they are drawn from.
_CLOSE_SHARE, _LONGEST_WINDOW = 0.5, 4

Draw = Callable[[np.random.Generator], np.ndarray]  # configuration numbers [n] int64


def config_draw(runtime_ns: np.ndarray, count: int, sampling: str) -> Draw:
  """Draws `count` configurations of one graph.

  Without replacement, a graph with fewer configurations than asked for gives all of them.

  Args:
    runtime_ns: `[C]` int64.
    count: size of the slate.
    sampling: one of `SAMPLINGS`. `skewed` draws the fastest configuration e times as often as
      the slowest, by weights exp((c - rank) / c), rank 0 the fastest (official layout trainer).
  """
  total, skewed = len(runtime_ns), sampling.startswith("skewed")
  order = np.argsort(runtime_ns, kind="stable")
  if sampling == "close_runtimes":
    return functools.partial(_close_runtimes, order, count)
  log_weight = np.empty(total)
  log_weight[order] = 1 - np.arange(total) / total
  if sampling.endswith("replacement"):
    cumulative = np.cumsum(np.exp(log_weight) if skewed else np.ones(total))
    return lambda rng: np.searchsorted(
        cumulative, rng.random(count) * cumulative[-1], side="right")
  if count >= total:
    return lambda rng: rng.permutation(total)
  if not skewed:
    return lambda rng: rng.choice(total, count, replace=False)
  # Gumbel top-k: the same as to draw one after the other by the weights.
  return lambda rng: np.argpartition(-(log_weight + rng.gumbel(size=total)), count)[:count]


def _close_runtimes(order: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """Every other slate from a few slates' length of configurations next to each other."""
  if count < len(order) and rng.random() < _CLOSE_SHARE:
    length = min(count * int(rng.integers(1, _LONGEST_WINDOW + 1)), len(order))
    start = int(rng.integers(len(order) - length + 1))
    order = order[start : start + length]
  return rng.choice(order, min(count, len(order)), replace=False)


def graph_weights(
    configs: Sequence[TileConfigs | LayoutConfigs], kind: str
) -> np.ndarray | None:
  """How often graphs are trained on relative to each other, `[graphs]` float64.

  Args:
    configs: of each graph.
    kind: `uniform`: all alike, returned as None; `proportional` to the number of
      configurations; `sqrt`: to its square root (5th place of the competition).
  """
  if kind == "uniform":
    return None
  counts = np.array([len(c) for c in configs], np.float64)
  return np.sqrt(counts) if kind == "sqrt" else counts


class ConfigSampler:
  """Draws the configurations of slates, and what a model should predict for them.

  Args:
    configs: configurations of each graph.
    count: size of a slate.
    sampling: one of `SAMPLINGS`.
    targets: `(configs, ids [n]) -> [n]` float32, larger = slower.
  """

  def __init__(
      self, configs: Sequence[TileConfigs | LayoutConfigs], *, count: int, sampling: str,
      targets: Callable[[Any, np.ndarray], np.ndarray],
  ):
    self._configs, self._targets = configs, targets
    self._draws = [config_draw(c.runtime_ns, count, sampling) for c in configs]

  def __call__(self, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers `[n]` int64 of the graph `number`, and targets `[n]` float32."""
    ids = self._draws[number](rng)
    return ids, self._targets(self._configs[number], ids)


def some_configs(total: int, limit: int, rng: np.random.Generator) -> np.ndarray:
  """Ascending numbers of at most `limit` of `total` configurations, `[n]` int64; 0 = all."""
  if not 0 < limit < total:
    return np.arange(total)
  return np.sort(rng.choice(total, limit, replace=False))


def slate_target(runtime_ns: np.ndarray, unit_ns: np.ndarray | float, kind: str) -> np.ndarray:
  """What a model predicts for one slate, `[C]` float32, larger = slower.

  It is computed from int64: `rank` keeps distinct runtimes distinct, `ratio` those whose
  distances from the fastest differ in float32.

  Args:
    runtime_ns: `[C]` int64 runtimes of the slate.
    unit_ns: `[C]`, or one number for all.
    kind: `official` and `absolute`: runtime in units; `ratio`: runtime above the fastest, relative to it;
      `rank`: share of the slate's distinct runtimes that are faster (4th place of the
      competition).
  """
  if kind in ("official", "absolute"):
    return (runtime_ns / unit_ns).astype(np.float32)
  if kind == "ratio":
    fastest = runtime_ns.min()
    return ((runtime_ns - fastest) / fastest).astype(np.float32)
  distinct, rank = np.unique(runtime_ns, return_inverse=True)
  return (rank / max(len(distinct) - 1, 1)).astype(np.float32)


def thirds(runtime_ns: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
  """A third of the fastest, a third of the slowest, the rest from between at random.

  Args:
    runtime_ns: `[C]` int64.
    count: how many configurations to keep.
    rng: source of randomness.

  Returns:
    `[min(count, C)]` ascending configuration numbers.

  Source: `max_configs` of the official layout trainer.
  """
  order = np.argsort(runtime_ns, kind="stable")
  if count >= len(order):
    return np.arange(len(order))
  third = count // 3
  middle = rng.choice(order[third : len(order) - third], count - 2 * third, replace=False)
  return np.sort(np.concatenate([order[:third], middle, order[len(order) - third :]]))


def sample_block(nodes: int, keep_nodes: int, rng: np.random.Generator) -> tuple[int, int]:
  """One of the `ceil(nodes / keep_nodes)` contiguous blocks of a graph, `(start, stop)`.

  Source: segment dropout of the official layout trainer.
  """
  blocks = -(-nodes // keep_nodes)
  start = int(rng.integers(blocks)) * keep_nodes
  return start, min(start + keep_nodes, nodes)
