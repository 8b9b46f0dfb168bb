"""Graph Segment Training: trains a network for whole programs on segments.

A training batch has S of the J segments of a program with gradients ("fresh"). Each of the
remaining segments is kept with probability p:

    total = eta * sum of fresh readouts + sum of kept readouts,  eta = p + (1 - p) J / S

The expected weight of every segment is then 1. Readouts without gradients come from a history table
(+E), or the step recomputes them. With p < 1 a step drops entries of the table (+D). With p = 0
there is no table. Scoring uses all segments, and eta = 1. Fine-tuning (+F) is a second phase: it
freezes the network, computes every readout once, and trains the head on sums of readouts. The
parameters have the names and shapes of the network for whole programs.

Source: Graph Segment Training (arXiv 2305.12322), with stale embedding dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Budget, Slate
from tpugraphs_jax.data.plan import Draw, Sampler, SlateDraft
from tpugraphs_jax.data.transforms import Transform
from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.infra import console, files, parallel
from tpugraphs_jax.rankers.family import Family, LayoutFamily, Phase
from tpugraphs_jax.rankers.scorer import Encoder, network_step
from tpugraphs_jax.rankers.segments import history
from tpugraphs_jax.rankers.segments.batches import (
  align,
  assemble,
  assemble_head,
  HeadBatch,
  HeadGraph,
  Others,
  partition,
  rows_of_segments,
  SegmentBatch,
  segmented,
  SegmentedGraph,
  SegmentSlate,
  split,
  Stale,
)
from tpugraphs_jax.rankers.segments.network import SegmentModel, SegmentOptions

_HISTORY_FOLDER = "history"
HEAD_FOLDER = "head"  # of the phase of the head, relative to the working folder


class Segments(Family):
  """Programs in segments.

  Args:
    programs: the family of the network.

  Attributes:
    programs: the argument; prepares and batches segments like small programs.
  """

  network: SegmentModel

  def __init__(self, programs: LayoutFamily):
    self.programs = programs
    self.options = programs.config.segments or SegmentOptions()
    super().__init__(SegmentModel(programs.network, self.options), programs.config)

  def check(self) -> None:
    """Refuses (ValueError) a table if a readout depends on other segments or configurations."""
    network = self.programs.network
    compares = network.compares_configs
    if self.options.uses_history and (compares or network.sees_whole_graph):
      scope = "across configurations" if compares else "at the whole graph"
      raise ValueError(
        f"this model looks {scope}: the history table has readouts of earlier steps, with other "
        "segments and configurations. Train without a table (variants full, gst and one)"
      )

  @property
  def config_transform(self) -> Transform | None:
    """The transform of configurations of `programs`."""
    return self.programs.config_transform

  @config_transform.setter
  def config_transform(self, transform: Transform | None) -> None:
    self.programs.config_transform = transform

  # Batches.

  def prepare(self, graph: OpGraph[LayoutConfigs], feat: np.ndarray) -> SegmentedGraph:
    """A reduced program, cut into segments; see `Family.prepare`."""
    reduced, options = self.programs.reduce(graph), self.options
    segment = partition(reduced.graph, method=options.partition, max_nodes=options.max_nodes)
    feats = rows_of_segments(reduced.rows(feat), segment)
    pieces = list(map(self.programs.prepare_part, split(reduced.graph, segment), feats))
    return segmented(reduced.graph, pieces, fresh=options.fresh)

  def check_graphs(self, graphs: Sequence[SegmentedGraph]) -> None:
    """Logs the segments; refuses (ValueError) more fresh segments than a training graph has."""
    fewest, fresh = min(graphs, key=lambda graph: len(graph.segments)), self.options.fresh
    if fresh > len(fewest.segments):
      raise ValueError(
        f"segments.fresh is {fresh}, but {fewest.name} has {len(fewest.segments)} "
        "segment(s): lower it, or take smaller segments (segments.max_nodes)"
      )
    segments = [len(graph.segments) for graph in graphs]
    edges = sum(graph.edges for graph in graphs)
    cut = edges - sum(len(piece.edge_index) for graph in graphs for piece in graph.segments)
    logging.info(
      f"{len(graphs)} graphs in {sum(segments)} segments ({min(segments)} to {max(segments)} "
      f"each); {cut} of {edges} edges ({100 * cut / max(edges, 1):.1f} %) are between segments and "
      "not used"
    )

  def draw(self, graphs: Sequence[SegmentedGraph], sampler: Sampler) -> Draw:
    """Draws the fresh segments of a slate, which set its sizes, then its configurations."""

    def draw(number: int, rng: np.random.Generator, turn: int) -> SlateDraft:
      graph = graphs[number]
      fresh = np.sort(rng.choice(len(graph.segments), self.options.fresh, replace=False))
      finish = lambda: SegmentSlate(graph, *sampler(number, rng, turn), number, fresh)
      if self.options.recompute:  # batches of the segments without gradients have these shapes
        return SlateDraft(graph.sizes, finish)
      return SlateDraft(batching.total_sizes([graph.segments[piece] for piece in fresh]), finish)

    return draw

  def assemble(
    self, slates: Sequence[SegmentSlate], budget: Budget, *, graphs: int, configs: int
  ) -> SegmentBatch:
    """A padded batch; see `batches.assemble`."""
    return assemble(
      slates,
      budget,
      graphs=graphs,
      configs=configs,
      fresh=self.options.fresh,
      assemble_layout=self.programs.assemble,
      with_others=self.options.recompute,
    )

  def stack(self, batches: Sequence[SegmentBatch]) -> SegmentBatch:
    """Batches of the local devices as one; see `batches.align`."""
    return parallel.stack_for_devices(align(batches))

  # Training.

  def attach_readouts(
    self,
    step: Callable,
    batches: Any,
    *,
    params: optax.Params,
    batch: SegmentBatch,
    graphs: Sequence[SegmentedGraph],
    folder: Path,
  ) -> tuple[Callable, Any]:
    """Gives the step the readouts without gradients; a table is saved with the batches."""
    if not self.options.recompute and not self.options.uses_history:
      return without_others(step), batches
    readout = functools.partial(self.network.apply, method="segment_readout")
    width = jax.eval_shape(readout, {"params": params}, batch.fresh).shape[-1]
    if self.options.recompute:
      return with_recomputed(step, self.network, width=width), batches
    keys, folder = history.Keys.of(graphs), folder / _HISTORY_FOLDER
    table = history.create(keys, width=width, dtype=self.options.history_dtype, folder=folder)
    snapshots = history.Snapshots(folder, keys, table)
    return with_history(step, table, keys), history.BatchesWithHistory(batches, snapshots)

  def first_phase(self, graphs: Sequence[SegmentedGraph], folder: Path) -> Phase:
    """The phase of the network; the head follows if it has epochs of its own (+F)."""
    phase = super().first_phase(graphs, folder)
    return dataclasses.replace(phase, is_last=not self.options.finetune.epochs)

  def next_phase(self, phase: Phase, params: optax.Params) -> Phase:
    """The phase of the head alone (+F), with the readouts of the trained network."""
    console.say(f"the network is trained: next, the {HEAD_FOLDER} alone")
    folder, finetune = phase.folder / HEAD_FOLDER, self.options.finetune
    head, sums = self.sum_readouts(params, phase.graphs, folder)
    optimizer = dataclasses.replace(phase.optimizer, learning_rate=finetune.learning_rate)
    return Phase(head, sums, folder, optimizer, finetune.epochs, params)

  def sum_readouts(
    self, params: optax.Params, graphs: Sequence[SegmentedGraph], folder: Path
  ) -> tuple[HeadFamily, list[HeadGraph]]:
    """The family of the head (+F), and its training graphs: sums of readouts over segments.

    Args:
      params: of the trained network.
      graphs: prepared training graphs.
      folder: for the file of sums; created if missing.
    """
    files.make_folder(folder)
    path = folder / f"totals_{parallel.process_index()}.npy"
    ids = [np.arange(len(graph.configs)) for graph in graphs]
    first = np.cumsum([0] + [len(graph.configs) for graph in graphs])
    logging.info(f"refreshing the readouts of {first[-1]} configurations of {len(graphs)} graphs")
    totals = None
    for number, total in self.encoder.stream(params, graphs, ids):
      if totals is None:
        shape = int(first[-1]), total.shape[1]
        totals = np.lib.format.open_memmap(path, "w+", np.float32, shape=shape)
      totals[first[number] : first[number + 1]] = total
    assert totals is not None  # of at least one graph
    parts = np.split(totals, first[1:-1])
    return HeadFamily(self), [
      HeadGraph(graph.name, graph.configs, part, len(graph.segments), {"nodes": 1})
      for graph, part in zip(graphs, parts)
    ]

  # Scores.

  @functools.cached_property
  def encoder(self) -> Encoder:
    """Sums of readouts `[n, P]` over all segments of a program."""
    options = self.config.eval
    return Encoder(
      network_step(self.network, method="segment_readout"),
      self.programs.assemble,
      graphs=options.graphs,
      configs=options.configs,
      even_slates=self.programs.network.compares_configs,
      max_budgets=1,
      pieces=lambda graph: graph.segments,
    )

  @functools.cached_property
  def _score_totals(self) -> Callable:
    score = functools.partial(self.network.apply, method="score_totals")
    return jax.jit(lambda params, *args: score({"params": params}, *args))

  def run_network(
    self, params: optax.Params, graphs: Sequence[SegmentedGraph], config_ids: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Scores `[n]` float32 of each program, from all segments with eta = 1."""
    totals = self.encoder.stream(params, graphs, config_ids)
    scores = {i: self.scores_of_totals(params, graphs[i], total) for i, total in totals}
    return [scores[number] for number in range(len(graphs))]

  def scores_of_totals(
    self, params: optax.Params, graph: SegmentedGraph, total: np.ndarray
  ) -> np.ndarray:
    """Scores `[n]` of configurations of a program, from totals `[n, P]`."""
    step, scores = self.config.eval.configs, [np.zeros(0, np.float32)]
    segments = np.array([len(graph.segments)], np.int32)
    for start in range(0, len(total), step):
      part = total[start : start + step]
      padded = np.pad(part, ((0, step - len(part)), (0, 0)))
      scores.append(np.asarray(self._score_totals(params, padded[None], segments))[0, : len(part)])
    return np.concatenate(scores)


def without_others(step: Callable) -> Callable:
  """Training on fresh segments alone: eta = J / S.

  Args:
    step: mapped training step with the readouts in `state.extra`.
  """

  def train_step(state, batch):
    state, metrics = step(state, batch)
    return state.replace(extra=()), metrics

  return train_step


def with_history(step: Callable, table: history.History, keys: history.Keys) -> Callable:
  """Reads the readouts without gradients from the table, and writes the fresh readouts.

  Args:
    step: as in `without_others`.
    table: changed by every step.
    keys: of the table.
  """

  def train_step(state, batch):
    others, fresh = keys.rows(batch)
    state, metrics = step(state, batch._replace(stale=table.read(others)))
    (values,) = state.extra["fresh"]
    table.write(fresh, values)
    return state.replace(extra=()), metrics

  return train_step


def with_recomputed(step: Callable, model: SegmentModel, *, width: int) -> Callable:
  """Recomputes the segments without gradients, with the current parameters.

  Args:
    step: as in `without_others`.
    model: computes readouts.
    width: width P of a readout.
  """

  def add(total, params, others: Others):
    values = model.apply({"params": params}, others.batch, method="segment_readout")
    return total.at[others.graph].add(values, mode="drop")

  add = parallel.pmap(add, donate_argnums=0, local=True)

  def train_step(state, batch):
    total = np.zeros((*batch.target.shape, width), np.float32)
    for others in batch.others:
      total = add(total, state.params, others)
    stale = Stale(jnp.expand_dims(total, -2), np.ones((*batch.target.shape, 1), bool))
    state, metrics = step(state, batch._replace(others=(), stale=stale))
    return state.replace(extra=()), metrics

  return train_step


class HeadFamily(Family):
  """The second phase (+F): trains the head alone, on batches of sums of readouts.

  Args:
    segments: the family of the first phase.
  """

  def __init__(self, segments: Segments):
    self._segments = segments
    self._totals: list[np.ndarray] | None = None
    self._key: list[tuple[str, bytes]] = []
    super().__init__(segments.network, segments.config)

  def check(self) -> None:
    """Checks nothing: the first phase has checked the config."""

  def assemble(
    self, slates: Sequence[Slate], budget: Budget, *, graphs: int, configs: int
  ) -> HeadBatch:
    """A batch of sums; see `batches.assemble_head`."""
    del budget  # a batch has no nodes
    return assemble_head(slates, graphs=graphs, configs=configs)

  def constrain(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `optimizer` to the parameters of the head; all other parameters stay."""
    # Names of parameters do not depend on the width of the readout.
    total, segments = jnp.zeros((1, 1, 1)), jnp.ones(1, jnp.int32)
    init = lambda: self.network.init(jax.random.key(0), total, segments, method="score_totals")
    names = set(jax.eval_shape(init).get("params", {}))
    label = lambda params: {k: "head" if k in names else "frozen" for k in params}
    return optax.partition({"head": optimizer, "frozen": optax.set_to_zero()}, label)

  def run_network(
    self, params: optax.Params, graphs: Sequence[SegmentedGraph], config_ids: Sequence[np.ndarray]
  ) -> list[np.ndarray]:
    """Scores `[n]` of each program. Every call must have the same programs and configurations."""
    key = [(graph.name, ids.tobytes()) for graph, ids in zip(graphs, config_ids)]
    if self._totals is None:
      self._totals = self._segments.encoder(params, graphs, config_ids)
      self._key = key
    assert key == self._key, "other programs or configurations than in the first call"
    return [
      self._segments.scores_of_totals(params, graph, total)
      for graph, total in zip(graphs, self._totals)
    ]
