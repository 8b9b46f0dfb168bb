"""What the graphs of a tile collection are: fused kernels, small enough to hold as they are."""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import npz, sampling, splits, tile_counts
from tpugraphs_jax.graph import OpGraph, TileConfigs


@dataclasses.dataclass(frozen=True)
class TileData:
  """Loads kernels and says what is learnt from them.

  Attributes:
    collection: of kind `tile`.
    skip_bad_files: leave out malformed files, by name, instead of stopping.
    target: one of `sampling.TARGETS`.
    config_features: blocks of `data.tile_counts` that a configuration has.
  """

  collection: Collection
  skip_bad_files: bool = False
  target: str = "official"
  config_features: tuple[str, ...] = ("released",)

  def load(self, data_root: str, split: str) -> list[OpGraph]:
    """Kernels of a split by name; bad files raise or are skipped by name."""
    files = npz.split_files(data_root, self.collection.name, split)
    with splits.explain_bad_files():
      return splits.read_files(files, npz.read_tile, skip_bad=self.skip_bad_files)

  def config_values(self, graph: OpGraph) -> np.ndarray:
    """What the transform of configurations is fitted on, `[C, 24 or more]` float32."""
    return tile_counts.extended(graph, self.config_features).configs.config_feat

  def why_not_trained(self, configs: TileConfigs, *, min_configs: int) -> str:
    """The reason to leave a kernel out of training; empty if there is none."""
    return splits.why_not_trained(configs, min_configs=min_configs)

  def targets(self, configs: TileConfigs, config_ids: np.ndarray) -> np.ndarray:
    """Training target `[len(config_ids)]` float32, larger = slower."""
    return sampling.tile_target(configs, config_ids, self.target)

  def validation_ids(self, name: str, configs: TileConfigs) -> np.ndarray:
    """Configurations that the final evaluation judges: all of them, `[C]` int64."""
    del name
    return np.arange(len(configs))
