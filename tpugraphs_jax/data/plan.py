"""Training batches: the slates of each step, their padded shapes, and loading by grain.

The content of a step is a pure function of the seed and the step number: a resumed run needs no
state, and every process computes the same plan. A slate is drawn in two parts: first its sizes,
then, when the batch is assembled, its configurations. Planning draws the sizes of many steps to
choose a few shapes. Every shape costs one compilation, and every padded node costs time. A long run
has therefore more shapes than a short run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any, Generic, NamedTuple, TYPE_CHECKING

from absl import logging
import numpy as np

from tpugraphs_jax.config_fields import option, Options
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Batch, Budget, PreparedGraph, Slate
from tpugraphs_jax.data.selection import TARGETS
from tpugraphs_jax.graph import LayoutConfigs, TileConfigs

if TYPE_CHECKING:
  import grain

# Budgets are chosen from the batches of the first epochs, and at most so many steps.
_LOOK_AHEAD_EPOCHS, _LOOK_AHEAD_STEPS = 16, 16_384
MAX_BUDGETS = 8
# In the time of one compilation (about 6 s on two CPU cores) training processes so many rows of
# features, at 0.25 million rows a second (width 64).
_ROWS_PER_COMPILATION = 1.5e6
_CONFIGS = 16  # of a slate, in the estimate of costs

SAMPLINGS = ("uniform", "skewed", "uniform_replacement")
GRAPH_SAMPLINGS = ("uniform", "sqrt", "every_config")


@dataclasses.dataclass(frozen=True)
class BatchOptions(Options):
  """Slates of a training step."""

  section = "batch"
  graphs: int = option(8, "graphs per step, over all devices", least=1)
  configs: int = option(16, "configurations per graph and step", least=2, most=2**16)
  min_configs: int = option(
    2, "fewest configurations of a graph in training and statistics", least=2
  )
  sampling: str = option(
    "uniform", "how configurations are drawn; skewed prefers fast ones", one_of=SAMPLINGS
  )
  graph_sampling: str = option(
    "uniform",
    "how graphs are drawn; sqrt: by the root of the number of configurations; "
    "every_config: each configuration once per pass",
    one_of=GRAPH_SAMPLINGS,
  )
  target: str = option(
    "ratio",
    "label: official (layouts: runtime / 1e7 ns, tiles: runtime / normalizer), absolute "
    "(ms), ratio or rank",
    one_of=TARGETS,
  )
  config_chunk: int = option(
    0, "configurations in the model at a time, to save memory; 0 = all", least=0, most=2**16
  )
  slates_per_epoch: int = option(0, "length of an epoch; 0 = one slate of each graph", least=0)
  drop_remainder: bool = option(True, "leave out the last slates of an epoch if they fill no batch")
  keep_nodes: int = option(
    5000, "nodes of the sampled block of a graph, for the dropout of ResModel", least=2
  )


@dataclasses.dataclass(frozen=True)
class LoadingOptions(Options):
  """Loading of batches."""

  section = "data"
  loader_threads: int = option(
    1, "threads that prepare batches; 0 = the training loop prepares them", least=0, most=256
  )


def config_draw(
  label: np.ndarray, count: int, sampling: str
) -> Callable[[np.random.Generator], np.ndarray]:
  """A function that draws the numbers `[n]` int64 of `count` configurations of one graph.

  Without replacement, a graph with fewer than `count` configurations gives all of them.

  Args:
    label: `[C]`, larger = slower.
    count: size of the slate.
    sampling: one of `SAMPLINGS`. `skewed` draws the fastest configuration e times as often as
      the slowest, by weights exp((c - rank) / c), with rank 0 for the fastest. Source: the official
      layout trainer.
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
  # Gumbel top-k is equivalent to draws one after the other by weight.
  return lambda rng: np.argpartition(-(log_weight + rng.gumbel(size=total)), count)[:count]


def graph_weights(
  configs: Sequence[TileConfigs | LayoutConfigs], kind: str, count: int
) -> np.ndarray | None:
  """Relative frequency of each graph in training, `[graphs]` float64; int64 for `every_config`.

  Args:
    configs: of each graph.
    kind: one of `GRAPH_SAMPLINGS`. `uniform` returns None; `sqrt` weighs by the square root of the
      number of configurations (5th place of the competition), `every_config` by the number of
      slates that hold every configuration once (3rd and 6th place).
    count: size of a slate.
  """
  if kind == "uniform":
    return None
  if kind == "every_config":
    return np.array([slates_of(len(c), count) for c in configs])
  return np.sqrt([len(c) for c in configs])


class ConfigSampler:
  """Draws the configurations of slates, and computes their targets.

  Args:
    configs: configurations of each graph.
    count: size of a slate.
    sampling: one of `SAMPLINGS`.
    targets: `(configs, ids [n]) -> [n]` float32, larger = slower.
    every: seed of permutations. The slates of a graph are consecutive parts of a permutation of its
      configurations, then of the next permutation (3rd and 6th place). A part that is too short at
      the end is left out. None draws slates independently.
  """

  def __init__(
    self,
    configs: Sequence[TileConfigs | LayoutConfigs],
    *,
    count: int,
    sampling: str,
    targets: Callable[[TileConfigs | LayoutConfigs, np.ndarray], np.ndarray],
    every: int | None = None,
  ):
    self._configs, self._targets, self._count = configs, targets, count
    self._every = every
    self._draws = [config_draw(c.labels, count, sampling) for c in configs]
    self._permutation = functools.lru_cache(maxsize=len(configs))(self._permute)

  def __call__(
    self, number: int, rng: np.random.Generator, turn: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Configuration numbers `[n]` int64 and targets `[n]` float32 of a slate.

    Args:
      number: of the graph.
      rng: of the slate.
      turn: number of earlier slates of the graph.
    """
    if self._every is None:
      ids = self._draws[number](rng)
    else:
      configs = self._configs[number]
      which, part = divmod(turn, slates_of(len(configs), self._count))
      permutation = self._permutation(self._every, number, which)
      ids = permutation[part * self._count : (part + 1) * self._count]
    return ids, self._targets(self._configs[number], ids)

  def _permute(self, seed: int, number: int, which: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 4, number, which])
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


class SlateDraft(NamedTuple):
  """A slate whose configurations are not drawn yet: planning needs only its sizes."""

  sizes: dict[str, int]  # of the slate, by entry of a budget
  finish: Callable[[], Any]  # draws the configurations with the same random generator


# Functions of the number of a graph, a random generator, and the number of earlier slates of the
# graph. A sampler gives configurations `[n]` int64 and targets `[n]` float32.
Draw = Callable[[int, np.random.Generator, int], SlateDraft]
Sampler = Callable[[int, np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def draw_slates(graphs: Sequence[PreparedGraph], sampler: Sampler) -> Draw:
  """Draws slates of whole graphs, which have the sizes of their graphs.

  Args:
    graphs: anything with `sizes`.
    sampler: draws configurations and targets, see `ConfigSampler`.
  """

  def draw(number: int, rng: np.random.Generator, turn: int) -> SlateDraft:
    graph = graphs[number]

    def finish() -> Slate:
      config_ids, target = sampler(number, rng, turn)
      return Slate(graph, config_ids, target, number)

    return SlateDraft(graph.sizes, finish)

  return draw


class BatchPlan:
  """The graphs and configurations of the batch of each step.

  An epoch is a pass over the graphs in random order, repeated until it has enough slates. With
  `drop_remainder`, as in the official code for kernels, an epoch leaves out its last slates if they
  do not fill a batch. Without it, as in the official code for programs, they form a smaller batch.
  An epoch with fewer slates than a batch is one smaller batch.

  The slates of a batch fill the devices in order: device `d` has the slates from
  `d * slates_per_device` on. In a smaller batch the last devices have fewer slates, or none. So the
  place of a slate in the batch, from which `parallel.slate_keys` makes its key, does not depend on
  the number of devices.

  Weights set how often each graph occurs in an epoch; the number is rounded up or down at random.
  Integer weights are numbers of slates per pass. The graphs of a pass are in random order, and an
  epoch may end within a pass.

  Every process computes the same plan, and loads the batches of its devices.

  Args:
    graphs: training graphs.
    slates_per_step: slates in a batch over all devices.
    devices: devices of all processes.
    draw: `(graph number, rng, turn) -> SlateDraft`, the first part of a slate.
    seed: of order and configurations.
    epochs: length of the run.
    slates_per_epoch: length of an epoch; 0 = one slate of each graph, or one pass.
    drop_remainder: leave out the last slates of an epoch if they do not fill a batch.
    weights: `[graphs]` relative frequencies; None = all equal.

  Attributes:
    slates_per_device: largest number of slates of a device in a batch.

  Raises:
    ValueError: fewer slates than devices.
  """

  def __init__(
    self,
    graphs: Sequence[PreparedGraph],
    *,
    slates_per_step: int,
    devices: int,
    draw: Draw,
    seed: int,
    epochs: int,
    slates_per_epoch: int = 0,
    drop_remainder: bool = True,
    weights: np.ndarray | None = None,
  ):
    self._sizes = [graph.sizes for graph in graphs]
    self._draw, self._seed, self._devices = draw, seed, devices
    in_passes = weights is not None and np.issubdtype(weights.dtype, np.integer)
    self._per_pass = weights if in_passes else None
    self._weights = None if in_passes else weights
    per_pass = len(graphs) if self._per_pass is None else int(self._per_pass.sum())
    self._per_epoch = slates_per_epoch or per_pass
    self._per_step = min(slates_per_step, self._per_epoch)
    if self._per_step < devices:
      raise ValueError(
        f"{self._per_step} slates per epoch for {devices} devices; set "
        f"batch.slates_per_epoch to at least {devices}"
      )
    self.slates_per_device = -(-self._per_step // devices)
    whole, rest = divmod(self._per_epoch, self._per_step)
    self.steps_per_epoch = whole + (rest > 0 and not drop_remainder)
    self._order = functools.lru_cache(maxsize=2)(self._draw_order)
    self.budgets = self._choose_budgets(epochs)

  def _draw_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Graphs of the slates of an epoch, and the number of earlier slates of each graph.

    The numbers are 0 without passes of integer weights.
    """
    if self._per_pass is not None:
      slates, one_pass = int(self._per_pass.sum()), functools.partial(self._pass, self._per_pass)
      first = epoch * self._per_epoch
      numbers = range(first // slates, -(-(first + self._per_epoch) // slates))
      order, turns = map(np.concatenate, zip(*map(one_pass, numbers)))
      start = first - numbers[0] * slates
      return order[start : start + self._per_epoch], turns[start : start + self._per_epoch]
    rng, graphs = np.random.default_rng([self._seed, epoch]), len(self._sizes)
    if self._weights is not None:
      ends = np.cumsum(self._weights) / np.sum(self._weights) * self._per_epoch
      # Systematic sampling: evenly spaced marks on the cumulated weights.
      marks = rng.random() + np.arange(self._per_epoch)
      places = np.searchsorted(ends, marks, side="right")
      order = rng.permutation(np.minimum(places, graphs - 1))
    else:
      passes = [rng.permutation(graphs) for _ in range(-(-self._per_epoch // graphs))]
      order = np.concatenate(passes)[: self._per_epoch]
    return order, np.zeros(len(order), int)

  def _pass(self, per_pass: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Graphs of the slates of a pass, and the number of earlier slates of each graph."""
    graphs = np.repeat(np.arange(len(per_pass)), per_pass)
    before = np.arange(len(graphs)) - np.repeat(np.cumsum(per_pass) - per_pass, per_pass)
    order = np.random.default_rng([self._seed, 5, number]).permutation(len(graphs))
    return graphs[order], before[order] + number * per_pass[graphs[order]]

  def _of_step(self, step: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    epoch, index = divmod(step, self.steps_per_epoch)
    part = slice(index * self._per_step, (index + 1) * self._per_step)
    cuts = self.slates_per_device * np.arange(1, self._devices)
    graphs, turns = self._order(epoch)
    return np.split(graphs[part], cuts), np.split(turns[part], cuts)

  def graphs_of_step(self, step: int) -> list[np.ndarray]:
    """Graph numbers of each device's slates, `[slates]` int64 each."""
    return self._of_step(step)[0]

  def _rngs(self, step: int, first: int = 0) -> Iterator[np.random.Generator]:
    """Generators of the slates of a step, from the slate `first` on.

    The seed of a generator is its place in the whole batch, so that the number of devices does not
    matter.
    """
    return (np.random.default_rng([self._seed, 1, step, i]) for i in itertools.count(first))

  def _device_sizes(self, step: int) -> list[dict[str, int]]:
    rngs = self._rngs(step)
    return [
      batching.add_sizes([self._draw(int(graph), next(rngs), 0).sizes for graph in graphs])
      for graphs in self.graphs_of_step(step)
      if len(graphs)
    ]

  def _choose_budgets(self, epochs: int) -> list[dict[str, int]]:
    look_ahead = min(min(epochs, _LOOK_AHEAD_EPOCHS) * self.steps_per_epoch, _LOOK_AHEAD_STEPS)
    per_step = [largest(self._device_sizes(step)) for step in range(look_ahead)]
    steps = epochs * self.steps_per_epoch
    if steps > look_ahead:
      # An upper bound of later batches: all slates have the size of the largest graph.
      per_step.append(batching.add_sizes([largest(self._sizes)] * self.slates_per_device))
    return choose_budgets(per_step, steps=steps)

  def budget(self, step: int) -> Budget:
    """The smallest budget that holds the step on every device."""
    return budgets_for(self._device_sizes(step), self.budgets)[0]

  def slates(self, step: int, device: int) -> list[Slate]:
    """The slates of one device, with their configurations."""
    shares, turns = self._of_step(step)
    rngs = self._rngs(step, sum(len(share) for share in shares[:device]))
    draws = zip(shares[device], turns[device], rngs)
    return [self._draw(int(graph), rng, int(turn)).finish() for graph, turn, rng in draws]

  def padding(self, steps: int) -> float:
    """Share of padding nodes over the first steps."""
    used = budget = 0
    for step in range(steps):
      used += sum(size["nodes"] for size in self._device_sizes(step))
      budget += self._devices * self.budget(step)["nodes"]
    return 1 - used / budget


class Batches(Generic[Batch]):
  """The batches of the devices of this process by step number, a source of grain.

  Args:
    plan: of the slates of each step.
    total_steps: length of the run.
    local_devices: numbers of the devices of this process, among all devices.
    assemble: `(slates, budget) -> batch` of one device.
    stack: stacks the batches of the local devices on a leading axis.
  """

  def __init__(
    self,
    plan: BatchPlan,
    total_steps: int,
    local_devices: Sequence[int],
    assemble: Callable[[list[Slate], Budget], Batch],
    stack: Callable[[list[Batch]], Batch],
  ):
    self._plan, self._total_steps, self._local_devices = plan, total_steps, local_devices
    self._assemble, self._stack = assemble, stack
    padding, count = plan.padding(min(plan.steps_per_epoch, 200)), len(plan.budgets)
    shapes = f"{count} shape{'s' * (count != 1)}"
    logging.info(f"batches have {shapes}; {100 * padding:.0f} % of their nodes are padding")

  def __len__(self) -> int:
    return self._total_steps

  def __getitem__(self, step: int) -> Batch:
    return self._stack([self._batch(step, device) for device in self._local_devices])

  def _batch(self, step: int, device: int) -> Any:
    """The batch of a device; empty if the step has no slate for it."""
    slates, budget = self._plan.slates(step, device), self._plan.budget(step)
    batch: Any = self._assemble(slates or self._plan.slates(step, 0), budget)
    return batch if slates else batching.emptied(batch)


def training_batches(
  source: Batches, *, threads: int = 1, prefetch: int = 4
) -> grain.DatasetIterator:
  """An iterator of batches with a leading device axis, loaded by grain.

  The state of the iterator is the number of the next step, so that resuming is exact.

  Args:
    source: the batches by step, see `Batches`.
    threads: loader threads; 0 prepares a batch on demand, while devices are busy with earlier
      steps.
    prefetch: number of batches to prepare ahead.
  """
  import grain  # slow to import

  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
  return iter(grain.MapDataset.source(source).to_iter_dataset(options))


def largest(sizes: Sequence[Budget]) -> dict[str, int]:
  """The maximum of every entry."""
  return {key: max(size[key] for size in sizes) for key in sizes[0]}


def cost(sizes: Sequence[Budget]) -> np.ndarray:
  """Cost of batches of these sizes in rows of features, `[len(sizes)]` int64.

  Layouts: nodes, plus (reached nodes x configurations). Kernels: nodes x configurations. Score
  tables, whose network does not depend on configurations: nodes.
  """
  varying = {k for k in sizes[0] if k.startswith("hop")}
  if not varying and "choices" not in sizes[0]:
    varying = {"nodes"}
  rows = {k: _CONFIGS if k in varying else int(k == "nodes") for k in sizes[0]}
  return np.array([[size[k] for k in rows] for size in sizes]) @ list(rows.values())


def choose_budgets(
  sizes: Sequence[Budget],
  *,
  steps: float = np.inf,
  max_budgets: int = MAX_BUDGETS,
  multiple: int = 16,
) -> list[dict[str, int]]:
  """Budgets that hold every batch and minimise the time of a run, smallest first.

  Batches are sorted by cost and cut into intervals with the least padding (dynamic programming over
  at most 150 candidate cuts). The budget of an interval is the maximum of every entry.

  Args:
    sizes: of each batch (`batching.total_sizes`); at least one.
    steps: length of the run; infinite unless given.
    max_budgets: largest number of budgets.
    multiple: entries are rounded up to a multiple of this.
  """
  keys = list(sizes[0])
  table = np.array([[size[k] for k in keys] for size in sizes])
  # Distinct batches with their counts: epochs repeat sizes.
  table, counts = np.unique(table, axis=0, return_counts=True)
  rows = cost([dict(zip(keys, row)) for row in table])
  by_rows = np.argsort(rows, kind="stable")
  table, counts, rows = table[by_rows], counts[by_rows], rows[by_rows]
  ends = _candidate_cuts(len(rows))
  options = [_best_cuts(rows, counts, ends, budgets) for budgets in range(1, max_budgets + 1)]
  # Times are relative to the run without padding.
  compilation = _ROWS_PER_COMPILATION / (steps * np.average(rows, weights=counts))
  time = lambda cuts: _padded(rows, counts, cuts) + compilation * len(cuts)
  cuts = min(options, key=time)
  starts = [0] + [cut + 1 for cut in cuts[:-1]]
  padding = np.array([key == "nodes" for key in keys])  # one node
  maxima = [table[start : stop + 1].max(axis=0) + padding for start, stop in zip(starts, cuts)]
  return [dict(zip(keys, (-(-budget // multiple) * multiple).tolist())) for budget in maxima]


def _candidate_cuts(batches: int) -> np.ndarray:
  """Evenly spaced batches, and more of the largest ones, where padding costs most."""
  even = np.linspace(0, batches - 1, min(batches, 128)).round().astype(int)
  from_the_end = 2 ** np.arange(batches.bit_length() - 1)
  return np.union1d(even, batches - 1 - from_the_end)


def _best_cuts(rows, counts, ends, budgets: int) -> list[int]:
  """Last batch of each of at most `budgets` intervals with the least padded cost."""
  total = np.concatenate([[0], np.cumsum(counts)])
  # padded[j]: least cost of batches 0..ends[j] with the intervals so far.
  padded = total[ends + 1] * rows[ends]
  choice = []
  for _ in range(budgets - 1):
    # Interval (i, j] after the best solution up to ends[i].
    interval = (total[ends + 1][None, :] - total[ends + 1][:, None]) * rows[ends][None, :]
    options = np.where(np.tri(len(ends), k=0, dtype=bool).T, padded[:, None] + interval, np.inf)
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


def budgets_for(sizes: Sequence[Budget], budgets: Sequence[Budget]) -> list[Budget]:
  """The budgets that hold all `sizes`, in their order."""
  return [budget for budget in budgets if all(batching.fits(size, budget) for size in sizes)]
