"""Which configurations of a graph make a slate, and what the model should predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, TileConfigs

SAMPLINGS = ("uniform", "skewed", "uniform_replacement", "skewed_replacement", "close_runtimes")
GRAPH_SAMPLINGS = ("uniform", "sqrt", "proportional")
# What a target lacks to be proportional to the runtime; ranks have lost it.
ORIGINS = {"official": 0.0, "ratio": 1.0, "rank": 0.0}
TARGETS = tuple(ORIGINS)
# Of slates of close runtimes (1st place of the competition): how many are, and how many
# slates long the window of sorted runtimes may be that they are drawn from.
_CLOSE_SHARE, _LONGEST_WINDOW = 0.5, 4
# Scale of layout labels in the official code.
_LAYOUT_UNIT_NS = 1e7


def skewed_keys(runtime_ns: np.ndarray) -> np.ndarray:
  """Log weights of the official layout sampling, `[C]` float64.

  `(c - rank) / c`, rank 0 the fastest: the fastest configuration is e times as
  likely as the slowest (official layout trainer).
  """
  order = np.argsort(runtime_ns, kind="stable")
  keys = np.empty(len(order))
  keys[order] = 1 - np.arange(len(order)) / len(order)
  return keys


def sample_configs(
    log_weight: np.ndarray | int, count: int, sampling: str, rng: np.random.Generator
) -> np.ndarray:
  """Numbers of `count` configurations, `[count]` int64.

  Without replacement, weights act through Gumbel top-k, and a graph with fewer
  configurations than asked for gives all of them.

  Args:
    log_weight: `[C]` from `skewed_keys`; the configurations `[C]` in order of runtime for
      `close_runtimes`; or else the number of configurations C.
    count: size of the slate.
    sampling: one of `SAMPLINGS`.
    rng: source of randomness.
  """
  if sampling == "close_runtimes":
    return _close_runtimes(log_weight, count, rng)
  skewed = sampling.startswith("skewed")
  total = len(log_weight) if skewed else int(log_weight)
  if sampling.endswith("replacement"):
    weight = np.exp(log_weight) if skewed else np.ones(total)
    cumulative = np.cumsum(weight)
    return np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
  if count >= total:
    return rng.permutation(total)
  if not skewed:
    return rng.choice(total, count, replace=False)
  keys = log_weight + rng.gumbel(size=total)
  return np.argpartition(-keys, count)[:count]


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
    self._configs, self._count, self._sampling = configs, count, sampling
    self._targets = targets
    self._weights = [_weights_of(c, sampling) for c in configs]

  def __call__(self, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers `[n]` int64 of the graph `number`, and targets `[n]` float32."""
    ids = sample_configs(self._weights[number], self._count, self._sampling, rng)
    return ids, self._targets(self._configs[number], ids)


def _weights_of(configs: TileConfigs | LayoutConfigs, sampling: str) -> np.ndarray | int:
  if sampling == "close_runtimes":
    return np.argsort(configs.runtime_ns, kind="stable")
  return skewed_keys(configs.runtime_ns) if sampling.startswith("skewed") else len(configs)


def some_configs(total: int, limit: int, rng: np.random.Generator) -> np.ndarray:
  """Ascending numbers of at most `limit` of `total` configurations, `[n]` int64; 0 = all."""
  if not 0 < limit < total:
    return np.arange(total)
  return np.sort(rng.choice(total, limit, replace=False))


def tile_target(configs: TileConfigs, ids: np.ndarray, kind: str = "official") -> np.ndarray:
  """What a tile model predicts, `[len(ids)]` float32, larger = slower.

  `official` is runtime / normalizer; `ratio` and `rank` see `slate_target`.
  """
  if kind == "official":
    return (configs.runtime_ns[ids] / configs.normalizer_ns[ids]).astype(np.float32)
  return slate_target(configs.runtime_ns[ids], kind)


def layout_target(configs: LayoutConfigs, ids: np.ndarray, kind: str = "official") -> np.ndarray:
  """What a layout model predicts, `[len(ids)]` float32; `official` is runtime / 1e7 ns."""
  if kind == "official":
    return (configs.runtime_ns[ids] / _LAYOUT_UNIT_NS).astype(np.float32)
  return slate_target(configs.runtime_ns[ids], kind)


def slate_target(runtime_ns: np.ndarray, kind: str) -> np.ndarray:
  """Target of one slate, computed from int64: `rank` keeps distinct runtimes distinct,
  `ratio` those whose distances from the fastest differ in float32.

  Args:
    runtime_ns: `[C]` int64 runtimes of the slate.
    kind: `ratio`: runtime above the fastest, relative to it; `rank`: share of the
      slate's distinct runtimes that are faster (4th place of the competition).
  """
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
