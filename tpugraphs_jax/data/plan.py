"""Training batches: what each step contains, in which shapes, and how grain loads them.

The content of a step is a pure function of the seed and the step's number: nothing has to
be remembered to go on after a stop, and every process computes the same plan. A slate is
drawn in two parts: its sizes, which say how much of a budget it takes, then, when the batch is
made, its configurations. Planning draws the first part of many steps, to choose
the few shapes that batches have. Every shape costs one compilation and every padded node
costs time, so that a long run is worth more shapes than a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING

from absl import logging
import numpy as np

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.data.selection import TARGETS
from tpugraphs_jax.graph import LayoutConfigs, TileConfigs
from tpugraphs_jax.options import option, Options

if TYPE_CHECKING:
  import grain

# Epochs, and most steps, whose batches are looked at to choose budgets.
_LOOK_AHEAD_EPOCHS, _LOOK_AHEAD_STEPS = 16, 16_384
MAX_BUDGETS = 8
# Rows of features that training works through in the time of a compilation: on two CPU
# cores that takes about 6 s, and training 0.25 million rows a second (width 64).
_ROWS_PER_COMPILATION = 1.5e6
# Configurations of a slate (layout presets: 16).
_CONFIGS = 16

EVERY = "every_config"
SAMPLINGS = ("uniform", "skewed", "uniform_replacement")
GRAPH_SAMPLINGS = ("uniform", "sqrt", "proportional", EVERY)


@dataclasses.dataclass(frozen=True)
class BatchOptions(Options):
  """Slates of a training step."""

  section = "batch"
  graphs: int = option(8, "graphs per step, over all devices", least=1)
  configs: int = option(16, "configurations per graph and step", least=2)
  min_configs: int = option(
      2, "graphs with fewer configurations are not trained on, nor part of statistics", least=2)
  sampling: str = option(
      "uniform", "how configurations are drawn; skewed: to fast ones", one_of=SAMPLINGS)
  graph_sampling: str = option(
      "uniform", "how graphs are drawn; sqrt, proportional: by numbers of configurations; "
      "every_config: each configuration once", one_of=GRAPH_SAMPLINGS)
  target: str = option(
      "ratio", "label: official (layouts: runtime / 1e7 ns, tiles: runtime / normalizer), absolute "
      "(ms), ratio or rank", one_of=TARGETS)
  config_chunk: int = option(
      0, "configurations through the model at a time, which saves memory; 0 = all", least=0)
  slates_per_epoch: int = option(0, "length of an epoch; 0 = one slate of each graph", least=0)
  drop_remainder: bool = option(True, "leave out last slates of an epoch that do not fill a batch")
  keep_nodes: int = option(
      5000, "nodes of the sampled block of a graph, for ResModel's dropout", least=2)


@dataclasses.dataclass(frozen=True)
class LoadingOptions(Options):
  """Threads of the host."""

  section = "data"
  loader_threads: int = option(
      1, "threads that prepare batches; 0 = a batch is prepared when it is asked for", least=0)


def config_draw(
    label: np.ndarray, count: int, sampling: str
) -> Callable[[np.random.Generator], np.ndarray]:
  """A function that draws the numbers `[n]` int64 of `count` configurations of one graph.

  Without replacement, a graph with fewer configurations than asked for gives all of them.

  Args:
    label: `[C]`, larger = slower.
    count: size of the slate.
    sampling: one of `SAMPLINGS`. `skewed` draws the fastest configuration e times as often as
      the slowest, by weights exp((c - rank) / c), rank 0 the fastest (official layout trainer).
  """
  total = len(label)
  if sampling == "uniform_replacement":
    return lambda rng: (rng.random(count) * total).astype(np.int64)
  if count >= total:
    return lambda rng: rng.permutation(total)
  if sampling == "uniform":
    return lambda rng: rng.choice(total, count, replace=False)
  log_weight = np.empty(total)
  log_weight[np.argsort(label, kind="stable")] = 1 - np.arange(total) / total
  # Gumbel top-k: the same as to draw one after the other by the weights.
  return lambda rng: np.argpartition(-(log_weight + rng.gumbel(size=total)), count)[:count]


def graph_weights(
    configs: Sequence[TileConfigs | LayoutConfigs], kind: str, count: int
) -> np.ndarray | None:
  """How often each graph is trained on relative to the others, `[graphs]` float64.

  Args:
    configs: of each graph.
    kind: one of `GRAPH_SAMPLINGS`. `uniform` returns None; `proportional` weighs by the number
      of configurations, `sqrt` by its square root (5th place of the competition), `every_config`
      by the number of slates that hold every configuration once (3rd and 6th place).
    count: size of a slate.
  """
  if kind == "uniform":
    return None
  if kind == EVERY:
    return np.array([slates_of(len(c), count) for c in configs])
  counts = np.array([len(c) for c in configs], np.float64)
  return np.sqrt(counts) if kind == "sqrt" else counts


class ConfigSampler:
  """Draws the configurations of slates and gives the targets that a model should predict.

  Args:
    configs: configurations of each graph.
    count: size of a slate.
    sampling: one of `SAMPLINGS`.
    targets: `(configs, ids [n]) -> [n]` float32, larger = slower.
    every: a seed; the slates of a graph are then cut from a permutation of its configurations,
      one after the other, and from the next permutation behind its end (3rd and 6th place).
      What is left over at an end is in no slate. None = slates are drawn independently.
  """

  def __init__(
      self, configs: Sequence[TileConfigs | LayoutConfigs], *, count: int, sampling: str,
      targets: Callable[[Any, np.ndarray], np.ndarray], every: int | None = None):
    self._configs, self._targets, self._count = configs, targets, count
    self._every = every
    self._draws = [config_draw(c.label, count, sampling) for c in configs]
    self._permutation = functools.lru_cache(maxsize=len(configs))(self._permute)

  def __call__(
      self, number: int, rng: np.random.Generator, turn: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers `[n]` int64 and targets `[n]` float32 of a slate.

    Args:
      number: of the graph.
      rng: of the slate.
      turn: how many slates of the graph came before.
    """
    if self._every is None:
      ids = self._draws[number](rng)
    else:
      configs = self._configs[number]
      which, part = divmod(turn, slates_of(len(configs), self._count))
      ids = self._permutation(number, which)[part * self._count : (part + 1) * self._count]
    return ids, self._targets(self._configs[number], ids)

  def _permute(self, number: int, which: int) -> np.ndarray:
    rng = np.random.default_rng([self._every, 4, number, which])
    return rng.permutation(len(self._configs[number]))


def slates_of(configs: int, count: int) -> int:
  """Number of slates of `count` configurations that a permutation is cut into; at least one."""
  return max(1, configs // count)


def sample_block(nodes: int, keep_nodes: int, rng: np.random.Generator) -> tuple[int, int]:
  """One of the `ceil(nodes / keep_nodes)` contiguous blocks of a graph, `(start, stop)`.

  Source: segment dropout of the official layout trainer.
  """
  blocks = -(-nodes // keep_nodes)
  start = int(rng.integers(blocks)) * keep_nodes
  return start, min(start + keep_nodes, nodes)


class Drawn(NamedTuple):
  """A slate whose configurations are not drawn yet: planning needs its sizes alone."""

  sizes: dict[str, int]  # how much of each entry of a budget the slate takes
  finish: Callable[[], Slate]  # goes on with the same random generator


# Of a graph's number, and of how many slates of it came before.
Draw = Callable[[int, np.random.Generator, int], Drawn]


def draw_slates(
    graphs: Sequence[PreparedGraph], sampler: Callable[[int, np.random.Generator, int], tuple]
) -> Draw:
  """Draws slates of whole graphs: a slate takes as much of a budget as its graph.

  Args:
    graphs: anything with `sizes`.
    sampler: configurations and targets of a graph, see `ConfigSampler`.
  """
  def draw(number: int, rng: np.random.Generator, turn: int) -> Drawn:
    graph = graphs[number]
    def finish() -> Slate:
      config_ids, target = sampler(number, rng, turn)
      return Slate(graph, config_ids, target, number)

    return Drawn(graph.sizes, finish)

  return draw


class BatchPlan:
  """The graphs and configurations of the batch of each step.

  An epoch passes over the graphs in random order, once or until it has enough slates.
  Its last slates are left out where they do not fill a batch (official for kernels), or are a
  smaller last batch (official for programs), in which a device can be without a slate. An epoch
  with fewer slates than a batch holds is a single step, whose batch has empty places; every
  device must have a slate there. With weights an epoch has every graph as often as its weight
  says, rounded up or down at random, in random order. Whole numbers as weights are numbers of
  slates: slates come in passes over all of them, each in random order, and epochs cut the passes
  where they end.

  Every process computes the same plan and loads the part of its own devices.

  Args:
    graphs: training graphs.
    slates_per_step: slates in a batch over all devices.
    devices: devices of all processes.
    draw: `(graph number, rng, turn) -> Drawn`; begins to draw a slate.
    seed: of order and configurations.
    epochs: length of the run; a long one is worth more batch shapes.
    slates_per_epoch: length of an epoch; 0 = one slate of each graph (official), or one pass.
    drop_remainder: leave out the last slates of an epoch if they do not fill a batch.
    weights: `[graphs]`, how often graphs come relative to each other; None = all alike.

  Raises:
    ValueError: fewer slates than devices.
  """

  def __init__(
      self, graphs: Sequence[PreparedGraph], *, slates_per_step: int, devices: int,
      draw: Draw, seed: int, epochs: int,
      slates_per_epoch: int = 0, drop_remainder: bool = True, weights: np.ndarray | None = None):
    self._sizes = [graph.sizes for graph in graphs]
    self._draw, self._seed, self._devices = draw, seed, devices
    self._weights = weights
    self._in_passes = weights is not None and np.issubdtype(weights.dtype, np.integer)
    self._per_epoch = slates_per_epoch or int(weights.sum() if self._in_passes else len(graphs))
    self._per_step = min(slates_per_step, self._per_epoch)
    if self._per_step < devices:
      raise ValueError(f"{self._per_step} slates per epoch for {devices} devices; set "
                       f"batch.slates_per_epoch to at least {devices}")
    self.slates_per_device = slates_per_step // devices
    whole, rest = divmod(self._per_epoch, self._per_step)
    self.steps_per_epoch = whole + (rest > 0 and not drop_remainder)
    self._order = functools.lru_cache(maxsize=2)(self._draw_order)
    self.budgets = self._choose_budgets(epochs)

  def _draw_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Graphs of an epoch, and how many slates of the same graph came before, as far as known."""
    if self._in_passes:
      slates = int(self._weights.sum())
      first = epoch * self._per_epoch
      passes = range(first // slates, -(-(first + self._per_epoch) // slates))
      graphs, turns = map(np.concatenate, zip(*map(self._pass, passes)))
      start = first - passes[0] * slates
      return graphs[start : start + self._per_epoch], turns[start : start + self._per_epoch]
    rng, graphs = np.random.default_rng([self._seed, epoch]), len(self._sizes)
    if self._weights is not None:
      ends = np.cumsum(self._weights) / np.sum(self._weights) * self._per_epoch
      # Where evenly spaced marks fall tells how often each graph comes.
      marks = rng.random() + np.arange(self._per_epoch)
      chosen = np.searchsorted(ends, marks, side="right")
      order = rng.permutation(np.minimum(chosen, graphs - 1))
    else:
      passes = [rng.permutation(graphs) for _ in range(-(-self._per_epoch // graphs))]
      order = np.concatenate(passes)[: self._per_epoch]
    return order, np.zeros(len(order), int)

  def _pass(self, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Graphs of a pass, and how many slates of the same graph came before."""
    per_pass = self._weights
    graphs = np.repeat(np.arange(len(per_pass)), per_pass)
    before = np.arange(len(graphs)) - np.repeat(np.cumsum(per_pass) - per_pass, per_pass)
    order = np.random.default_rng([self._seed, 5, number]).permutation(len(graphs))
    return graphs[order], before[order] + number * per_pass[graphs[order]]

  def _of_step(self, step: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    epoch, index = divmod(step, self.steps_per_epoch)
    own = slice(index * self._per_step, (index + 1) * self._per_step)
    graphs, turns = self._order(epoch)
    return np.array_split(graphs[own], self._devices), np.array_split(turns[own], self._devices)

  def graphs_of_step(self, step: int) -> list[np.ndarray]:
    """Graph numbers of each device's slates, `[slates]` int64 each."""
    return self._of_step(step)[0]

  def _rngs(self, step: int, first: int = 0) -> Iterator[np.random.Generator]:
    """One for each slate of a step, from the slate `first` on.

    Seeded by the place in the whole batch, so that the number of devices is free.
    """
    return (np.random.default_rng([self._seed, 1, step, i]) for i in itertools.count(first))

  def _device_sizes(self, step: int) -> list[dict[str, int]]:
    rngs = self._rngs(step)
    return [
        batching.add_sizes([self._draw(int(graph), next(rngs), 0).sizes for graph in graphs])
        for graphs in self.graphs_of_step(step) if len(graphs)]

  def _choose_budgets(self, epochs: int) -> list[dict[str, int]]:
    known = min(min(epochs, _LOOK_AHEAD_EPOCHS) * self.steps_per_epoch, _LOOK_AHEAD_STEPS)
    per_step = [largest(self._device_sizes(step)) for step in range(known)]
    steps = epochs * self.steps_per_epoch
    if steps > known:
      # Some later batch may exceed all of these. One batch stands for it, of slates that are as
      # large as the largest graph in every entry: no batch is larger.
      per_step.append(batching.add_sizes([largest(self._sizes)] * self.slates_per_device))
    return choose_budgets(per_step, steps=steps)

  def budget(self, step: int) -> Budget:
    """The smallest budget that holds the step on every device."""
    return self.budgets[smallest_fit(self._device_sizes(step), self.budgets)]

  def slates(self, step: int, device: int) -> list[Slate]:
    """The slates of one device, with configurations drawn for this step."""
    shares, turns = self._of_step(step)
    rngs = self._rngs(step, sum(len(share) for share in shares[:device]))
    return [self._draw(int(graph), rng, int(turn)).finish()
            for graph, turn, rng in zip(shares[device], turns[device], rngs)]

  def padding(self, steps: int) -> float:
    """Share of padding nodes over the first steps."""
    used = budget = 0
    for step in range(steps):
      used += sum(size["nodes"] for size in self._device_sizes(step))
      budget += self._devices * self.budget(step)["nodes"]
    return 1 - used / budget


class Batches:
  """Random access source: step number to the batches of this process's devices.

  Args:
    plan: what each step contains.
    total_steps: length of the run.
    local_devices: numbers of this process's devices among all.
    assemble: `(slates, budget) -> batch` of one device.
    stack: puts the batches of the local devices on a leading axis.
  """

  def __init__(self, plan: BatchPlan, total_steps: int, local_devices: Sequence[int],
               assemble: Callable[[list[Slate], Budget], Any], stack: Callable[[list], Any]):
    self._plan, self._total_steps, self._local_devices = plan, total_steps, local_devices
    self._assemble, self._stack = assemble, stack
    shown = min(plan.steps_per_epoch, 200)
    logging.info("batches have %d shape%s; %.0f %% of their nodes are padding", len(plan.budgets),
                 "s" * (len(plan.budgets) != 1), 100 * plan.padding(shown))

  def __len__(self) -> int:
    return self._total_steps

  def __getitem__(self, step: int) -> Any:
    return self._stack([self._batch(step, device) for device in self._local_devices])

  def _batch(self, step: int, device: int) -> Any:
    """The batch of a device, which is empty if the step has fewer slates than devices."""
    slates, budget = self._plan.slates(step, device), self._plan.budget(step)
    if slates:
      return self._assemble(slates, budget)
    return batching.emptied(self._assemble(self._plan.slates(step, 0), budget))


def training_batches(
    source: Sequence[Any], *, threads: int = 1, prefetch: int = 4) -> grain.DatasetIterator:
  """Batches with a leading device axis, prepared ahead by grain.

  The iterator's state is the number of the next step, so that resuming is exact.

  Args:
    source: the batches by step, see `Batches`.
    threads: loader threads; 0 prepares a batch when it is asked for, while the device
      is busy with the steps in flight.
    prefetch: batches that the threads hold ready.
  """
  import grain  # slow to import: no command that only reads options waits for it

  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
  return iter(grain.MapDataset.source(source).to_iter_dataset(options))


def largest(sizes: Sequence[Budget]) -> dict[str, int]:
  """The largest size of every entry: the batches of all devices have one shape."""
  return {key: max(size[key] for size in sizes) for key in sizes[0]}


def cost(sizes: Sequence[Budget]) -> np.ndarray:
  """Rows of features that batches of these sizes take, `[len(sizes)]` int64.

  For layouts their nodes, and every node that configurations reach once per configuration; for
  kernels their nodes once per configuration; for score tables, whose network sees no
  configuration, their nodes.
  """
  varying = {k for k in sizes[0] if k.startswith("hop")}
  if not varying and "choices" not in sizes[0]:
    varying = {"nodes"}
  rows = {k: _CONFIGS if k in varying else int(k == "nodes") for k in sizes[0]}
  return np.array([[size[k] for k in rows] for size in sizes]) @ list(rows.values())


def choose_budgets(
    sizes: Sequence[Budget], *, steps: float = np.inf, max_budgets: int = MAX_BUDGETS,
    multiple: int = 16,
) -> list[dict[str, int]]:
  """Budgets that hold every batch, smallest first, with which a run takes the least time.

  Batches are sorted by cost and cut into runs so that padding costs the least
  possible (dynamic programming over at most 150 candidate cuts); each run gets
  the maximum of every entry.

  Args:
    sizes: of each batch (`batching.total_sizes`); at least one.
    steps: length of the run that these batches stand for; without end unless given.
    max_budgets: most budgets allowed.
    multiple: entries are rounded up to a multiple of this.
  """
  keys = list(sizes[0])
  # Distinct batches only: epochs repeat sizes, and the maximum does not care.
  table, counts = np.unique(
      np.array([[size[k] for k in keys] for size in sizes]), axis=0, return_counts=True)
  rows = cost([dict(zip(keys, row)) for row in table])
  by_rows = np.argsort(rows, kind="stable")
  table, counts, rows = table[by_rows], counts[by_rows], rows[by_rows]
  ends = _candidate_cuts(len(rows))
  options = [_best_cuts(rows, counts, ends, budgets) for budgets in range(1, max_budgets + 1)]
  # Relative to the run without padding.
  compilation = _ROWS_PER_COMPILATION / (steps * np.average(rows, weights=counts))
  time = lambda cuts: _padded(rows, counts, cuts) + compilation * len(cuts)
  cuts = min(options, key=time)
  starts = [0] + [cut + 1 for cut in cuts[:-1]]
  chosen = [table[start : stop + 1].max(axis=0) for start, stop in zip(starts, cuts)]
  return [
      {k: _round_up(int(v) + (k == "nodes"), multiple) for k, v in zip(keys, budget)}
      for budget in chosen]


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _candidate_cuts(batches: int) -> np.ndarray:
  """Evenly spaced batches, and more of the largest ones, where padding costs most."""
  even = np.linspace(0, batches - 1, min(batches, 128)).round().astype(int)
  from_the_end = 2 ** np.arange(batches.bit_length() - 1)
  return np.union1d(even, batches - 1 - from_the_end)


def _best_cuts(rows, counts, ends, budgets: int) -> list[int]:
  """Last batch of each of at most `budgets` runs, with the least padded cost in all."""
  total = np.concatenate([[0], np.cumsum(counts)])
  # padded[j]: of batches 0..ends[j] with the runs so far.
  padded = total[ends + 1] * rows[ends]
  choice = []
  for _ in range(budgets - 1):
    # run (i, j] after the best solution up to ends[i]
    run = (total[ends + 1][None, :] - total[ends + 1][:, None]) * rows[ends][None, :]
    options = np.where(np.tri(len(ends), k=0, dtype=bool).T, padded[:, None] + run, np.inf)
    choice.append(options.argmin(axis=0))
    padded = options.min(axis=0)
  cuts = [len(ends) - 1]
  for best in reversed(choice):
    cuts.append(int(best[cuts[-1]]))
  return [int(ends[cut]) for cut in sorted(set(cuts))]


def _padded(rows, counts, cuts) -> float:
  """Cost of all batches with padding, relative to their cost without padding."""
  budget = rows[np.array(cuts)[np.searchsorted(cuts, np.arange(len(rows)))]]
  return float((budget * counts).sum() / (rows * counts).sum())


def smallest_fit(sizes: Sequence[Budget], budgets: Sequence[Budget]) -> int | None:
  """Number of the first budget that holds every one of `sizes`, or None."""
  for i, budget in enumerate(budgets):
    if all(_fits(size, budget) for size in sizes):
      return i
  return None


def _fits(size: Budget, budget: Budget) -> bool:
  # One node stays free for the padding graph.
  return size["nodes"] < budget["nodes"] and all(size[k] <= budget[k] for k in size)
