"""Scores all configurations of graphs in chunks.

A unit is one graph with one chunk of its configurations. Units are packed into batches
of the types that training has, in few shapes. The batches are spread over all devices and
processes, and every process gets all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from tpugraphs_jax import console, parallel
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate


# Padding, as a share of the batch, that is not worth another compilation.
_PADDING = 0.25


class Unit(NamedTuple):
  """One chunk of the configurations of one graph."""

  graph: int
  config_ids: np.ndarray  # [<= chunk] int64
  count: int  # of them whose scores are wanted: the first ones
  block: tuple[int, int] | None = None


def chunks(config_ids: np.ndarray, size: int, *, whole: bool) -> list[tuple[np.ndarray, int]]:
  """Configurations in chunks of at most `size`, each with the number that is wanted of it.

  Args:
    config_ids: `[n]` int64.
    size: of a chunk.
    whole: fill the last chunk up with the first configurations, so that it is a slate
      like any other for models that look across it; fewer than `size` stay as they are.
  """
  parts = [config_ids[start : start + size] for start in range(0, len(config_ids), size)]
  counts = [len(part) for part in parts]
  if whole and len(parts) > 1:
    parts[-1] = np.concatenate([parts[-1], config_ids[: size - counts[-1]]])
  return list(zip(parts, counts))


class Budgets:
  """Few budgets that hold batches of any sizes: those that are known, and new ones at need."""

  def __init__(self):
    self._budgets: list[Budget] = []  # smallest first
    self._seen: set[tuple[int, ...]] = set()

  def for_sizes(
      self, sizes: Sequence[dict[str, int]], *, max_budgets: int = plan.MAX_BUDGETS
  ) -> list[Budget]:
    """Budgets that hold these batches, smallest first.

    Args:
      sizes: what each batch takes.
      max_budgets: most new ones, made where no known budget is close.
    """
    new = [size for size in sizes if not self._fits_closely(size)]
    if new:
      self._budgets += plan.choose_budgets(new, steps=len(new), max_budgets=max_budgets)
      self._budgets.sort(key=lambda budget: plan.cost([budget])[0])
    self._seen.update(tuple(size.values()) for size in sizes)
    return self._budgets

  def _fits_closely(self, size: dict[str, int]) -> bool:
    if tuple(size.values()) in self._seen:
      return True
    number = plan.smallest_fit([size], self._budgets)
    if number is None:
      return False
    room, taken = plan.cost([self._budgets[number], size])
    return room <= (1 + _PADDING) * taken


@contextlib.contextmanager
def explaining_memory(options: Mapping[str, Any]) -> Iterator[None]:
  """Inside, a lack of memory is a ValueError of one line that says what takes less.

  Args:
    options: fields `eval` of a config.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).splitlines()[0].rstrip(".")
    raise ValueError(
        f"{reason}; scoring takes less with a smaller eval.configs ({options['configs']} now) or "
        f"eval.graphs ({options['graphs']} now)") from error


class Scorer:
  """Scores graphs with one model.

  Args:
    score_step: mapped `(params, batch) -> [devices, G, C]` (or more axes), the scores.
    assemble: `(slates, budget, graphs=, configs=) -> batch`.
    graphs_per_batch: units G in a batch.
    configs_per_batch: configurations C in a unit.
    whole_slates: the model looks across a unit's configurations, see `chunks`.
  """

  def __init__(
      self, score_step: Callable[[Any, Any], Any], assemble: Callable[..., Any], *,
      graphs_per_batch: int, configs_per_batch: int, whole_slates: bool = False,
  ):
    self._whole = whole_slates
    self._score_step, self._assemble = score_step, assemble
    self._graphs, self._configs = graphs_per_batch, configs_per_batch
    self._budgets = Budgets()

  def scores(
      self, params: Any, graphs: Sequence[PreparedGraph], *,
      config_ids: Sequence[np.ndarray] | None = None,
      blocks: Sequence[tuple[int, int]] | None = None, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores of every graph, each `[its configurations]` float32, larger = slower.

    Args:
      params: model parameters, without a device axis.
      graphs: graphs to score.
      config_ids: configurations of each graph; all of them unless given.
      blocks: node range of each graph the model looks at, for `dropout` models.
      progress: shows a bar.
    """
    if not graphs:
      return []
    chosen = config_ids or [np.arange(len(graph.configs)) for graph in graphs]
    units = self._units(graphs, chosen, blocks)
    batches = [units[i : i + self._graphs] for i in range(0, len(units), self._graphs)]
    devices = parallel.local_device_count()
    groups = [batches[i : i + devices] for i in range(0, len(batches), devices)]
    budgets = self._budgets.for_sizes([_largest(_sizes(graphs, group)) for group in groups])
    results = [np.zeros(len(ids), np.float32) for ids in chosen]
    filled = [0] * len(graphs)
    for unit, row in self._run(params, graphs, groups, budgets, progress):
      start = filled[unit.graph]
      results[unit.graph][start : start + len(row)] = row
      filled[unit.graph] += len(row)
    return results

  def _units(self, graphs, chosen, blocks) -> list[Unit]:
    by_size = sorted(range(len(graphs)), key=lambda i: (len(graphs[i].opcode), i))
    return [
        Unit(i, ids, count, blocks[i] if blocks else None)
        for i in by_size
        for ids, count in chunks(chosen[i], self._configs, whole=self._whole)
    ]

  def _run(self, params, graphs, groups, budgets, progress):
    """Yields every unit with its scores, in order, the same in all processes."""
    replicated, local = parallel.replicate(params), []
    mine = range(parallel.process_index(), len(groups), parallel.process_count())
    bar = tqdm.tqdm(mine, unit="batch", disable=console.bar(progress and parallel.is_primary()))
    for number in bar:
      local.append((number, self._score_group(replicated, graphs, groups[number], budgets)))
    for number, group_scores in sorted(sum(parallel.gather_objects(local), []), key=lambda g: g[0]):
      for batch, scores in zip(groups[number], group_scores):
        for unit, row in zip(batch, scores):
          yield unit, row[: unit.count]

  def _score_group(self, params, graphs, group: list[list[Unit]], budgets: Sequence[Budget]):
    budget = budgets[plan.smallest_fit(_sizes(graphs, group), budgets)]
    # The last group repeats a batch on devices that have none.
    padded = group + group[-1:] * (parallel.local_device_count() - len(group))
    batch = parallel.stack_for_devices([
        self._assemble([self._slate(graphs, unit) for unit in units], budget,
                       graphs=self._graphs, configs=self._configs)
        for units in padded
    ])
    return np.asarray(self._score_step(params, batch))[: len(group)]

  def _slate(self, graphs, unit: Unit) -> Slate:
    return Slate(graphs[unit.graph], unit.config_ids,
                np.zeros(len(unit.config_ids), np.float32), unit.graph, unit.block)


def _sizes(graphs, group: list[list[Unit]]) -> list[dict[str, int]]:
  """What each device's batch takes."""
  return [batching.total_sizes([graphs[unit.graph] for unit in batch]) for batch in group]


def _largest(sizes: Sequence[dict[str, int]]) -> dict[str, int]:
  """Room for any of them: all devices have one shape."""
  return {key: max(size[key] for size in sizes) for key in sizes[0]}
