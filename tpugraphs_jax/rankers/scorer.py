"""Runs networks on graphs of any size, in batches of few shapes.

    graphs -> pieces -> units -> batches -> network, on all devices -> outputs of each graph

An `Encoder` runs a network on graphs. A unit is one piece of a graph with one chunk of its
configurations. Units form batches of the same structure as in training. All devices and processes
share the batches, and every process gets all outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple
import zlib

from flax import linen as nn
import jax
import numpy as np
import optax

from tpugraphs_jax.config_fields import option, Options
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.infra import console, parallel

# A new shape is compiled if padding exceeds this share of a batch.
_PADDING = 0.25
# Upper bound of bytes per row (node, edge or table entry) and configuration. If it exceeds the free
# memory, XLA gives the exact memory of the program.
_MOST_ROW_BYTES = 1 << 12
_FREE = 0.8  # share of the free memory that a program of fewer configurations may take


def network_step(
  network: nn.Module, *, method: str | None = None, devices: Sequence[jax.Device] | None = None
) -> Callable[[optax.Params, Any], Any]:
  """The mapped function `(params, batch) -> outputs`; both arguments have a device axis.

  Args:
    network: maps a batch to scores `[G, C]`.
    method: of the network; `__call__` unless given.
    devices: to compile for; the local devices unless given.
  """
  apply = lambda params, batch: network.apply({"params": params}, batch, method=method)
  return parallel.pmap(apply, local=True, devices=devices)


class Unit(NamedTuple):
  """One piece of a graph with one chunk of its configurations."""

  graph: int
  piece: int
  start: int  # index of the first configuration among the scored configurations of the graph
  config_ids: np.ndarray  # [<= chunk] int64


def chunks(config_ids: np.ndarray, size: int, *, even: bool) -> list[np.ndarray]:
  """Splits configurations into the fewest chunks of at most `size`, each `[<= size]` int64.

  Args:
    config_ids: `[n]` int64.
    size: largest length of a chunk.
    even: lengths differ by at most one, for networks whose scores depend on the slate (1st and 6th
      place of the competition); otherwise the last chunk may be shorter.
  """
  count = -(-len(config_ids) // size)
  if even:
    return np.array_split(config_ids, count) if count else []
  return np.split(config_ids, range(size, len(config_ids), size)) if count else []


class Budgets:
  """Padded sizes of batches. Adds a budget only if a batch fits no budget closely."""

  def __init__(self):
    self._budgets: list[Budget] = []  # smallest first
    self._sizes: set[tuple[int, ...]] = set()  # of earlier batches

  def for_sizes(
    self, sizes: Sequence[Budget], *, max_budgets: int = plan.MAX_BUDGETS
  ) -> list[Budget]:
    """Budgets that hold these batches, smallest first.

    Args:
      sizes: of each batch, by entry of a budget.
      max_budgets: most new budgets.
    """
    new = [size for size in sizes if not self._fits_closely(size)]
    if new:
      self._budgets += plan.choose_budgets(new, steps=len(new), max_budgets=max_budgets)
      self._budgets.sort(key=lambda budget: plan.cost([budget])[0])
    self._sizes.update(tuple(size.values()) for size in sizes)
    return self._budgets

  def _fits_closely(self, size: Budget) -> bool:
    if tuple(size.values()) in self._sizes:
      return True
    budgets = plan.budgets_for([size], self._budgets)
    if not budgets:
      return False
    padded_cost, cost = plan.cost([budgets[0], size])
    return padded_cost <= (1 + _PADDING) * cost


class Encoder:
  """Runs a network on graphs.

  Args:
    step: mapped `(params, batch) -> [devices, units, configurations, ...]`; any tree
      `[devices, units, ...]` where `configs` is 0.
    assemble: `(slates, budget, graphs=, configs=) -> batch`.
    graphs: units per batch.
    configs: configurations per unit; 0 = the network does not depend on configurations.
    even_slates: the network compares the configurations of a unit, see `chunks`.
    pieces: splits a prepared graph into parts whose outputs are added; None = the graph is one
      piece.
    max_budgets: most shapes to compile for one call.
  """

  def __init__(
    self,
    step: Callable[[optax.Params, Any], Any],
    assemble: Callable[..., Any],
    *,
    graphs: int,
    configs: int,
    even_slates: bool = False,
    pieces: Callable[[Any], Sequence[PreparedGraph]] | None = None,
    max_budgets: int = plan.MAX_BUDGETS,
  ):
    self._step, self._assemble, self._even = step, assemble, even_slates
    self._graphs, self._configs, self._max_budgets = graphs, configs, max_budgets
    self._pieces = pieces or (lambda graph: (graph,))
    self._budgets = Budgets()
    self._needed: dict[tuple[int, ...], int] = {}  # bytes of programs, by budget

  def __call__(
    self, params: optax.Params, graphs: Sequence[Any], config_ids: Sequence[np.ndarray], **options
  ) -> list[Any]:
    """The outputs of each graph; arguments as in `stream`."""
    outputs = dict(self.stream(params, graphs, config_ids, **options))
    return [outputs[number] for number in range(len(graphs))]

  def stream(
    self,
    params: optax.Params,
    graphs: Sequence[Any],
    config_ids: Sequence[np.ndarray],
    *,
    blocks: Sequence[tuple[int, int]] | None = None,
  ) -> Iterator[tuple[int, Any]]:
    """Outputs graph by graph, small graphs first, so that memory holds outputs of few graphs.

    Args:
      params: of the network, without a device axis.
      graphs: prepared graphs.
      config_ids: `[n]` int64 for each graph.
      blocks: node range of each graph, for networks that sample a block of nodes.

    Yields:
      The number of a graph, and its outputs `[n, ...]`, sums over its pieces. Where `configs` is
      0, the output of the step for the graph.
    """
    pieces = [list(self._pieces(graph)) for graph in graphs]
    nodes = [sum(piece.sizes["nodes"] for piece in parts) for parts in pieces]
    by_size = sorted(range(len(graphs)), key=lambda i: (nodes[i], i))
    configs = self._fitting_configs(params, pieces, blocks)
    units = [unit for i in by_size for unit in self._units(i, pieces[i], config_ids[i], configs)]
    left = np.bincount([unit.graph for unit in units], minlength=len(graphs))
    outputs: dict[int, Any] = {}
    for unit, output in self._outputs(params, pieces, units, blocks, configs):
      number = unit.graph
      outputs[number] = self._add(outputs.get(number), unit, output, len(config_ids[number]))
      left[number] -= 1
      if not left[number]:
        yield number, outputs.pop(number)
    for number in (i for i, ids in enumerate(config_ids) if self._configs and not len(ids)):
      yield number, np.zeros(0, np.float32)

  def _units(
    self, number: int, pieces: Sequence[PreparedGraph], ids: np.ndarray, configs: int
  ) -> list[Unit]:
    if not self._configs:
      return [Unit(number, piece, 0, np.zeros(0, np.int64)) for piece in range(len(pieces))]
    parts = chunks(ids, configs, even=self._even)
    starts = np.cumsum([0, *map(len, parts)])
    return [
      Unit(number, piece, int(start), part)
      for start, part in zip(starts, parts)
      for piece in range(len(pieces))
    ]

  def _fitting_configs(self, params, pieces, blocks) -> int:
    """Configurations per unit: `configs`, or fewer where free memory does not hold so many.

    Slates of a network that compares configurations keep their size.
    """
    if not self._configs or self._even or not pieces:
      return self._configs
    free = min(parallel.gather_objects(parallel.free_memory()))
    rows = lambda place: sum(pieces[place[0]][place[1]].sizes.values())
    places = ((graph, piece) for graph, parts in enumerate(pieces) for piece in range(len(parts)))
    graph, piece = max(places, key=rows)
    if self._graphs * self._configs * rows((graph, piece)) * _MOST_ROW_BYTES <= free:
      return self._configs
    unit = Unit(graph, piece, 0, np.zeros(1, np.int64))
    (budget,) = plan.choose_budgets([batching.total_sizes([pieces[graph][piece]] * self._graphs)])
    key = tuple(budget.values())
    if key not in self._needed:
      batch = self._batch(pieces, [[unit] * self._graphs], budget, blocks, self._configs)
      self._needed[key] = parallel.memory_of(self._step, parallel.replicate(params), batch)
    if self._needed[key] <= free:
      return self._configs
    return max(1, int(self._configs * _FREE * free / self._needed[key]))

  def _add(self, total: Any, unit: Unit, output: Any, configs: int) -> Any:
    """Adds the output of a unit to the outputs of its graph."""
    if not self._configs:
      return output
    if total is None:
      total = np.zeros((configs, *output.shape[1:]), np.float32)
    count = len(unit.config_ids)
    total[unit.start : unit.start + count] += output[:count]
    return total

  def _outputs(self, params, pieces, units: list[Unit], blocks, configs):
    """Every unit with its output, in the same order in all processes."""
    batches = _runs_of(units, self._graphs)
    groups = _runs_of(batches, parallel.local_device_count())
    size = lambda batch: batching.total_sizes([pieces[unit.graph][unit.piece] for unit in batch])
    sizes = [[size(batch) for batch in group] for group in groups]
    largest = [plan.largest(group) for group in sizes]
    budgets = self._budgets.for_sizes(largest, max_budgets=self._max_budgets)
    replicated = parallel.replicate(params)
    processes = parallel.process_count()
    with console.working("scoring", total=len(groups), unit="batches") as work:
      for start in range(0, len(groups), processes):
        number, local = start + parallel.process_index(), None
        if number < len(groups):
          budget = plan.budgets_for(sizes[number], budgets)[0]
          batch = self._batch(pieces, groups[number], budget, blocks, configs)
          local = jax.tree.map(np.asarray, self._step(replicated, batch))
        for group, outputs in zip(groups[start:], parallel.gather_objects(local)):
          work.update()
          for device, batch in enumerate(group):
            for place, unit in enumerate(batch):
              yield unit, jax.tree.map(lambda leaf: leaf[device][place], outputs)

  def _batch(self, pieces, group: list[list[Unit]], budget: Budget, blocks, configs: int) -> Any:
    # In the last group, devices without a batch repeat the last one.
    padded = group + group[-1:] * (parallel.local_device_count() - len(group))
    sizes = {"graphs": self._graphs, "configs": configs or 1}
    batches = []
    for units in padded:
      slates = []
      for unit in units:
        target, block = np.zeros(len(unit.config_ids), np.float32), blocks and blocks[unit.graph]
        piece = pieces[unit.graph][unit.piece]
        slates.append(Slate(piece, unit.config_ids, target, unit.graph, block))
      batches.append(self._assemble(slates, budget, **sizes))
    return parallel.stack_for_devices(batches)


def _runs_of(items: list, count: int) -> list[list]:
  return [items[i : i + count] for i in range(0, len(items), count)]


def rng_of(graph: PreparedGraph, seed: int) -> np.random.Generator:
  """The random numbers of a graph in scoring, independent of other graphs."""
  return np.random.default_rng([seed, zlib.crc32(graph.name.encode())])


@dataclasses.dataclass(frozen=True)
class EvalOptions(Options):
  """Batches of scoring."""

  section = "eval"
  graphs: int = option(1, "graphs per device and scoring call", least=1, most=2**10)
  configs: int = option(100, "configurations per graph and scoring call", least=2, most=2**16)
  permutations: int = option(
    1,
    "random orders of configurations to average over, for models that compare configurations",
    least=1,
    most=2**10,
  )
