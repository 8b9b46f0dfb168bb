"""Layout collections by Graph Segment Training: memory does not grow with the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpugraphs_jax.data import batching as layout_batching
from tpugraphs_jax.data import buckets, sampling, store
from tpugraphs_jax.data.batching import Budget
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.segments import batching, finetune, history, partition, train_step
from tpugraphs_jax.segments import model as model_lib
from tpugraphs_jax.segments.batching import SegmentBatch, SegmentedGraph, SegmentSlate
from tpugraphs_jax.segments.finetune import HeadGraph
from tpugraphs_jax.segments.score import SegmentScorer
from tpugraphs_jax.tasks import checks
from tpugraphs_jax.tasks.layout import LayoutTask
from tpugraphs_jax.tasks.task import Phase
from tpugraphs_jax.train import state as state_lib

_HEAD_FOLDER, _HISTORY_FOLDER = "head", "history"


class SegmentTask(LayoutTask):
  """`LayoutTask` on segments; `config.segments` says how."""

  def __init__(self, config):
    self._store_folders: dict[str, Path] = {}
    self.options = config.segments
    super().__init__(config)
    self.final_folder = _HEAD_FOLDER if self.options.finetune.epochs else ""

  def create_model(self, name: str, **options: Any) -> model_lib.SegmentModel:
    chosen = self.options
    return model_lib.SegmentModel(
        super().create_model(name, **options), readout=chosen.readout,
        aggregation=chosen.aggregation, keep=chosen.keep, history_init=chosen.history_init,
        keep_unit=chosen.keep_unit)

  def _check(self, config) -> None:
    super()._check(config)
    checks.one_of(config, {
        "segments.partition": tuple(partition.METHODS), "segments.readout": model_lib.READOUTS,
        "segments.aggregation": model_lib.AGGREGATIONS,
        "segments.history_init": model_lib.HISTORY_INITS,
        "segments.keep_unit": model_lib.KEEP_UNITS, "segments.history_dtype": history.DTYPES,
        "segments.history_place": history.PLACES,
    })
    checks.at_least(config, {
        "segments.max_nodes": 2, "segments.fresh": 1, "segments.finetune.epochs": 0,
        "segments.finetune.configs": 0})
    self._check_combinations()
    try:
      state_lib.create_optimizer(total_steps=1, **config.segments.finetune.optimizer)
    except ValueError as error:
      raise ValueError(f"--config.segments.finetune: {error}") from None

  def _check_combinations(self) -> None:
    options, layout_model = self.options, self.model.model
    if self.config.batch.config_chunk:
      raise ValueError("--config.batch.config_chunk does not go with segments, which bound memory "
                       "themselves: set it to 0")
    if not 0 <= options.keep <= 1:
      raise ValueError(f"--config.segments.keep is {options.keep}, expected 0 to 1: the "
                       "probability that a segment without gradient counts")
    if options.recompute and options.keep != 1:
      raise ValueError(f"--config.segments.keep is {options.keep}, but with "
                       "--config.segments.recompute every segment counts: set keep to 1")
    if options.recompute and options.history_init != "zero":
      raise ValueError(f"--config.segments.history_init is {options.history_init!r}, but with "
                       "--config.segments.recompute no entry is unwritten: set it to zero")
    if options.finetune.epochs and options.readout == "scalar":
      raise ValueError("--config.segments.finetune.epochs needs --config.segments.readout="
                       "embedding: with scalar the head comes before the sum over segments")
    if getattr(layout_model, "dropout", "fullgraph") != "fullgraph":
      raise ValueError(f"--config.model.dropout is {layout_model.dropout!r}; segments take the "
                       "place of blocks: set it to fullgraph")
    whole = getattr(layout_model, "whole_graph_options", ())
    if whole and self.uses_history:
      raise ValueError(
          f"--config.model has {', '.join(whole)}, which looks at the whole graph or across "
          "configurations: the history table keeps a segment's readout of an earlier step, with "
          "other segments and configurations around it. Leave it out, or train without a table "
          "(variants full, gst and one)")

  @property
  def uses_history(self) -> bool:
    """Whether training needs a table: not if others are recomputed or never count."""
    return self.options.keep > 0 and not self.options.recompute

  # Data.

  def load(self, data_root: str, split: str) -> list[OpGraph]:
    graphs = super().load(data_root, split)
    folders = store.graph_folders(
        data_root, self.collection, split, store_dir=self.config.data.store_dir or None)
    self._store_folders |= {folder.name: folder for folder in folders.values()}
    return graphs

  def prepare(self, graph: OpGraph) -> SegmentedGraph:
    small, options = self.reduce(graph), self.options
    segment = partition.cached_partition(
        small, self._store_folders.get(graph.name), method=options.partition,
        max_nodes=options.max_nodes)
    pieces, cut_edges = partition.split(small, segment)
    prepared = [
        layout_batching.prepare(
            piece, self.node_input(piece), hops=self.model.hops, slots=self.neighbour_slots)
        for piece in pieces
    ]
    return batching.segmented(small, prepared, fresh=options.fresh, cut_edges=cut_edges)

  def draw(self, graphs: Sequence[Any]) -> Callable[[int, np.random.Generator], Any]:
    draw_slate = super().draw(graphs)
    if isinstance(graphs[0], HeadGraph):
      return draw_slate

    def draw(number: int, rng: np.random.Generator) -> SegmentSlate:
      fresh = self._draw_fresh(graphs[number], rng)
      slate = draw_slate(number, rng)
      return SegmentSlate(slate.graph, slate.config_ids, slate.target, number, fresh)

    return draw

  def _draw_fresh(self, graph: SegmentedGraph, rng: np.random.Generator) -> np.ndarray:
    """First thing that is drawn for a slate: `slate_sizes` draws it again."""
    return np.sort(rng.choice(len(graph.segments), self.options.fresh, replace=False))

  def slate_sizes(self, graphs: Sequence[Any]):
    if isinstance(graphs[0], HeadGraph) or self.options.recompute:
      return None  # recomputed segments need room as well: that for the largest

    def sizes(number: int, rng: np.random.Generator) -> dict[str, int]:
      graph = graphs[number]
      return layout_batching.total_sizes(
          [graph.segments[i] for i in self._draw_fresh(graph, rng)])

    return sizes

  def assemble(self, slots: Sequence[Any], budget: Budget, *, graphs: int, configs: int) -> Any:
    if isinstance(slots[0].graph, HeadGraph):
      return finetune.assemble(slots, graphs=graphs, configs=configs)
    return batching.assemble(
        slots, budget, graphs=graphs, configs=configs, fresh=self.options.fresh,
        assemble_layout=super().assemble, with_others=self.options.recompute)

  def stack(self, batches: Sequence[Any]) -> Any:
    if isinstance(batches[0], SegmentBatch):
      return batching.stack_for_devices(batches)
    return super().stack(batches)

  def example_batch(self, graph: SegmentedGraph) -> SegmentBatch:
    slot = SegmentSlate(graph, np.arange(1), np.zeros(1, np.float32), 0, np.zeros(1, np.int64))
    (budget,) = buckets.choose_budgets([graph.segments[0].sizes])
    return batching.assemble(
        [slot], budget, graphs=1, configs=1, fresh=1, assemble_layout=super().assemble)

  # Training.

  def train_step(self, optimizer, **options: Any):
    return super().train_step(
        optimizer, **({"collections": (model_lib.READOUT_COLLECTION,)} | options))

  def first_phase(self, graphs: Sequence[SegmentedGraph], workdir: Path) -> Phase:
    options = self.options
    batching.check(graphs, fresh=options.fresh, max_nodes=options.max_nodes)
    phase = super().first_phase(graphs, workdir)
    following = None
    if options.finetune.epochs:
      following = functools.partial(self.head_phase, graphs, workdir)
    width = self.readout_width(phase.state.params, graphs[0])
    if options.recompute:
      step = train_step.with_recomputed(phase.train_step, self.model, width=width)
    elif self.uses_history:
      return self._with_history(
          dataclasses.replace(phase, following=following), graphs, workdir, width=width)
    else:
      step = train_step.without_others(phase.train_step)
    return dataclasses.replace(phase, train_step=step, following=following)

  def _with_history(
      self, phase: Phase, graphs: Sequence[SegmentedGraph], workdir: Path, *, width: int
  ) -> Phase:
    """The phase with a table, which is saved and restored with the position in the data."""
    folder, options = workdir / _HISTORY_FOLDER, self.options
    keys = history.Keys.of(graphs)
    table = history.create(
        keys, width=width, dtype=options.history_dtype, place=options.history_place,
        folder=folder)
    snapshots = history.Snapshots(folder, keys, table)
    snapshots.check()
    return dataclasses.replace(
        phase, train_step=train_step.with_history(phase.train_step, table, keys),
        batches=history.BatchesWithHistory(phase.batches, snapshots))

  def readout_width(self, params: Any, graph: SegmentedGraph) -> int:
    """Numbers P of a segment's readout."""
    readout = lambda params, batch: self.model.apply(
        {"params": params}, batch, method="segment_readout")
    return jax.eval_shape(readout, params, self.example_batch(graph).fresh).shape[-1]

  def head_phase(
      self, graphs: Sequence[SegmentedGraph], workdir: Path, state: state_lib.TrainState
  ) -> Phase:
    """Training of the head alone, on readouts of the trained backbone (+F)."""
    options, scorer = self.options.finetune, self.scorer()
    rng = np.random.default_rng(self.config.seed)
    ids = [sampling.some_configs(len(graph.configs), options.configs, rng) for graph in graphs]
    known = finetune.refresh(
        scorer, state.eval_params, graphs, ids, workdir / _HEAD_FOLDER)
    plan = self.plan(known, epochs=options.epochs)
    total_steps = options.epochs * plan.steps_per_epoch
    optimizer = self._head_optimizer(total_steps)
    head = model_lib.HeadModel(self.model)
    return Phase(
        state_lib.TrainState.create(state.eval_params, optimizer),
        self.train_step(optimizer, model=head, collections=()),
        self.batches(plan, total_steps), finetune.FrozenScorer(scorer), options.epochs,
        plan.steps_per_epoch, folder=_HEAD_FOLDER)

  def _head_optimizer(self, total_steps: int):
    optimizer = state_lib.create_optimizer(
        total_steps=total_steps, **self.options.finetune.optimizer)
    return finetune.head_optimizer(optimizer, self.model)

  def final_optimizer(self):
    if self.options.finetune.epochs:
      return self._head_optimizer(total_steps=1)
    return super().final_optimizer()

  # Evaluation.

  def scorer(self) -> SegmentScorer:
    options = self.config.eval
    return SegmentScorer(
        self.model, super().assemble, segments_per_batch=options.graphs,
        configs_per_batch=options.configs)
