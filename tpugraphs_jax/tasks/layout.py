"""The four layout collections: rank layouts of every convolution, dot and reshape."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from tpugraphs_jax import evaluate
from tpugraphs_jax.data import (
    batching, duplicates, features, npz, reduction, sampling, store, validation_indices)
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.graph import LAYOUT_CONFIG_FEATURES, LayoutConfigs, OpGraph
from tpugraphs_jax.models import interface
from tpugraphs_jax.tasks import checks, loading, task

# A model trained on sampled blocks is judged on the mean of three (official).
_BLOCKS_IN_EVALUATION = 3


class LayoutTask(task.Task):
  """Jobs on `layout:<source>:<search>`."""

  slowdown_ks = (1, 10, 100)

  def __init__(self, config):
    super().__init__(config, f"layout:{config.data.source}:{config.data.search}")

  def _check(self, config) -> None:
    super()._check(config)
    checks.one_of(config, {
        "data.source": ("xla", "nlp"), "data.search": ("random", "default"),
        "data.duplicate_policy": duplicates.POLICIES,
        "data.graph_reduction": reduction.REDUCTIONS,
        "data.reduction_direction": reduction.DIRECTIONS,
        "data.reduction_induced": reduction.INDUCED,
    })
    checks.at_least(config, {
        "data.reduction_hops": 1, "data.max_configs": 0, "batch.keep_nodes": 2,
        "eval.max_configs": 0})
    if config.model.name == "SAGE" and config.data.config_transform != "none":
      raise ValueError(
          f"--config.data.config_transform is {config.data.config_transform!r}, but SAGE embeds "
          "the integers of configurations: set it to 'none', or take another model")

  def create_model(self, name: str, **options: Any):
    return interface.create("layout", name, **options)

  def load(self, data_root: str, split: str) -> list[OpGraph]:
    data = self.config.data
    with loading.explain_bad_files():
      folders = store.ensure_store(
          data_root, self.collection, split, store_dir=data.store_dir or None,
          skip_bad_files=data.skip_bad_files)
    files = npz.split_files(data_root, self.collection, split)
    loading.report_skipped(files, len(files) - len(folders))
    graphs = [store.open_graph(folder) for folder in folders]
    if split == "train":
      graphs = [duplicates.apply_policy(graph, data.duplicate_policy) for graph in graphs]
      graphs = [self._limit_configs(graph) for graph in graphs]
    return self.with_extra_features(graphs)

  def _limit_configs(self, graph: OpGraph) -> OpGraph:
    limit = self.config.data.max_configs
    if not 0 < limit < len(graph.configs):
      return graph
    rng = np.random.default_rng(self.config.seed)
    ids = sampling.thirds(graph.configs.runtime_ns, limit, rng)
    return dataclasses.replace(graph, configs=graph.configs.subset(ids))

  def check_configs(self, graph: OpGraph) -> None:
    loading.check_kind(graph, LayoutConfigs)

  def why_not_trained(self, configs: LayoutConfigs) -> str:
    """As `Task.why_not_trained`; also graphs that have nothing to rank."""
    reason = super().why_not_trained(configs)
    if reason:
      return reason
    if not configs.differ:
      return "all configurations equal"
    return "all runtimes equal" if np.ptp(configs.runtime_ns) == 0 else ""

  def fit_configs(self, graphs: Sequence[OpGraph]) -> features.Transform:
    kinds = np.full(LAYOUT_CONFIG_FEATURES, self.config.data.config_transform, dtype=object)
    return features.fit((g.configs.rows for g in graphs), kinds)

  def reduce(self, graph: OpGraph) -> OpGraph:
    """The part of the graph that the model sees."""
    data = self.config.data
    return reduction.reduce_graph(
        graph, reduction=data.graph_reduction, hops=data.reduction_hops,
        direction=data.reduction_direction, induced=data.reduction_induced)

  def prepare(self, graph: OpGraph) -> PreparedGraph:
    small = self.reduce(graph)
    return batching.prepare(
        small, self.node_input(small), hops=self.model.sees.hops, slots=self.neighbour_slots)

  def target(self, graph: PreparedGraph, config_ids: np.ndarray) -> np.ndarray:
    return sampling.layout_target(graph.configs, config_ids, self.config.batch.target)

  def assemble(self, slots: Sequence[Slate], budget: Budget, *, graphs: int, configs: int):
    return batching.assemble_layout(
        slots, budget, graphs=graphs, configs=configs, transform=self.transforms["config"])

  def draw_block(self, graph: PreparedGraph, rng: np.random.Generator) -> tuple[int, int] | None:
    """One of the contiguous blocks of at most `keep_nodes` nodes (official)."""
    if getattr(self.model, "dropout", "fullgraph") == "fullgraph":
      return None
    return sampling.sample_block(len(graph.opcode), self.config.batch.keep_nodes, rng)

  @functools.cached_property
  def _indices(self) -> dict[str, np.ndarray]:
    data = self.config.data
    return validation_indices.load(self.config.eval.indices_dir, data.source, data.search)

  def validation_ids(self, graph: PreparedGraph) -> np.ndarray:
    """The published indices, else all configurations or a seeded sample of them."""
    options, total = self.config.eval, len(graph.configs)
    if options.indices_dir:
      return validation_indices.select(self._indices, graph.name, total)
    return sampling.some_configs(
        total, options.max_configs, np.random.default_rng(self.config.seed))

  def score_blocks(
      self, scorer: evaluate.Scorer, params: Any, graphs: Sequence[PreparedGraph],
      config_ids: Sequence[np.ndarray], *, progress: bool = False,
  ) -> list[np.ndarray]:
    """Scores; those of `dropout` models are the mean over three sampled blocks."""
    if getattr(self.model, "dropout", None) != "dropout":
      return super().score_blocks(scorer, params, graphs, config_ids, progress=progress)
    rng = np.random.default_rng(self.config.seed)
    runs = [
        scorer.scores(params, graphs, config_ids=config_ids, progress=progress,
                      blocks=[self.draw_block(graph, rng) for graph in graphs])
        for _ in range(_BLOCKS_IN_EVALUATION)
    ]
    return [np.mean(scores, axis=0) for scores in zip(*runs)]
