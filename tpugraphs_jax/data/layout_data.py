"""What the graphs of a layout collection are: programs, read through the store."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import duplicates, npz, runtime_filter, sampling, splits, store
from tpugraphs_jax.data import validation_indices
from tpugraphs_jax.graph import LayoutConfigs, OpGraph


@dataclasses.dataclass(frozen=True)
class LayoutData:
  """Loads programs and says what is learnt from them.

  Attributes:
    collection: of kind `layout`.
    skip_bad_files: leave out malformed files, by name, instead of stopping.
    target: one of `sampling.TARGETS`.
    store_dir: the random-access copy; empty = `<data_root>/store`.
    duplicate_policy: one of `duplicates.POLICIES`, for training graphs.
    entropy_threshold: of `runtime_filter.drop_flat`, for training graphs; 0 = no filter.
    max_configs: most configurations per training graph: thirds fastest, slowest and
      random; 0 = all.
    indices_dir: folder of the published validation indices; empty = none.
    max_validated: most configurations per validation graph, a seeded sample; 0 = all.
    seed: of samples.
  """

  collection: Collection
  skip_bad_files: bool = False
  target: str = "official"
  store_dir: str = ""
  duplicate_policy: str = "keep"
  entropy_threshold: float = 0.0
  max_configs: int = 0
  indices_dir: str = ""
  max_validated: int = 0
  seed: int = 0

  def load(self, data_root: str, split: str) -> list[OpGraph]:
    """Programs of a split by name; bad files raise or are skipped by name."""
    with splits.explain_bad_files():
      folders = store.ensure_store(
          data_root, self.collection.name, split, store_dir=self.store_dir or None,
          skip_bad_files=self.skip_bad_files)
    files = npz.split_files(data_root, self.collection.name, split)
    splits.report_skipped(files, len(files) - len(folders))
    graphs = store.open_graphs(folders)
    if split == "train":
      graphs = [duplicates.apply_policy(graph, self.duplicate_policy) for graph in graphs]
      graphs = [runtime_filter.drop_flat(graph, self.entropy_threshold) for graph in graphs]
      graphs = [self._limit_configs(graph) for graph in graphs]
    return graphs

  def _limit_configs(self, graph: OpGraph) -> OpGraph:
    if not 0 < self.max_configs < len(graph.configs):
      return graph
    rng = np.random.default_rng(self.seed)
    ids = sampling.thirds(graph.configs.runtime_ns, self.max_configs, rng)
    return dataclasses.replace(graph, configs=graph.configs.subset(ids))

  def config_values(self, graph: OpGraph) -> np.ndarray:
    """What the transform of configurations is fitted on, `[R, 18]` int8."""
    return graph.configs.rows

  def why_not_trained(self, configs: LayoutConfigs, *, min_configs: int) -> str:
    """The reason to leave a program out of training; empty if there is none.

    Besides the reasons of `splits.why_not_trained`: a program has nothing to rank.
    """
    reason = splits.why_not_trained(configs, min_configs=min_configs)
    if reason:
      return reason
    if not configs.differ:
      return "all configurations equal"
    return "all runtimes equal" if np.ptp(configs.runtime_ns) == 0 else ""

  def targets(self, configs: LayoutConfigs, config_ids: np.ndarray) -> np.ndarray:
    """Training target `[len(config_ids)]` float32, larger = slower."""
    return sampling.layout_target(configs, config_ids, self.target)

  @functools.cached_property
  def _indices(self) -> dict[str, np.ndarray]:
    _, source, search = self.collection.name.split(":")
    return validation_indices.load(self.indices_dir, source, search)

  def validation_ids(self, name: str, configs: LayoutConfigs) -> np.ndarray:
    """Configurations that the final evaluation judges, `[n]` int64.

    The published indices where they are given, else all configurations or a seeded
    sample of them.
    """
    if self.indices_dir:
      return validation_indices.select(self._indices, name, len(configs))
    return sampling.some_configs(
        len(configs), self.max_validated, np.random.default_rng(self.seed))
