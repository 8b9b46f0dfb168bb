"""The tile collection: rank tile sizes of fused kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tpugraphs_jax import metrics
from tpugraphs_jax.data import batching, features, npz, sampling
from tpugraphs_jax.data.batching import Budget, PreparedGraph, Slate
from tpugraphs_jax.graph import OpGraph, TILE_CONFIG_FEATURES, TileConfigs
from tpugraphs_jax.models import interface
from tpugraphs_jax.tasks import loading, task

COLLECTION = "tile:xla"


class TileTask(task.Task):
  """Jobs on `tile:xla`."""

  slowdown_ks = (1, 5, 10)

  def __init__(self, config):
    super().__init__(config, COLLECTION)

  def create_model(self, name: str, **options: Any):
    return interface.create("tile", name, **options)

  def load(self, data_root: str, split: str) -> list[OpGraph]:
    files = npz.split_files(data_root, self.collection, split)
    with loading.explain_bad_files():
      graphs = loading.read_files(files, npz.read_tile, skip_bad=self.config.data.skip_bad_files)
    return self.with_extra_features(graphs)

  def check_configs(self, graph: OpGraph) -> None:
    loading.check_kind(graph, TileConfigs)

  def fit_configs(self, graphs: Sequence[OpGraph]) -> features.Transform:
    kinds = np.full(TILE_CONFIG_FEATURES, self.config.data.config_transform, dtype=object)
    return features.fit((g.configs.config_feat for g in graphs), kinds)

  def prepare(self, graph: OpGraph) -> PreparedGraph:
    return batching.prepare(graph, self.node_input(graph), slots=self.neighbour_slots)

  def target(self, graph: PreparedGraph, config_ids: np.ndarray) -> np.ndarray:
    return sampling.tile_target(graph.configs, config_ids, self.config.batch.target)

  def assemble(self, slots: Sequence[Slate], budget: Budget, *, graphs: int, configs: int):
    return batching.assemble_tile(
        slots, budget, graphs=graphs, configs=configs, transform=self.transforms["config"])

  def validation_ids(self, graph: PreparedGraph) -> np.ndarray:
    return np.arange(len(graph.configs))

  def summary(self, rows: Sequence[Mapping[str, Any]], means: Mapping[str, float]) -> str:
    """Slowdown per program (kernels up to the last `_`), then overall."""
    lines = [super().summary(rows, means)]
    by_k = {
        k: metrics.mean_by_program({row["graph"]: row[f"slowdown{k}"] for row in rows})
        for k in (1, 5)
    }
    lines += [
        f"  {program}: slowdown1 {by_k[1][program]:.4f}  slowdown5 {by_k[5][program]:.4f}"
        for program in by_k[1]
    ]
    return "\n".join(lines)
