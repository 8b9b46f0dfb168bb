"""The network of Graph Segment Training, and its options.

A program's score is that of the sum of the readouts of its segments. See `segments.family`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.config_fields import option, Options
from tpugraphs_jax.data.batching import Array, LayoutBatch
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.layers import Precise
from tpugraphs_jax.rankers.segments import history
from tpugraphs_jax.rankers.segments.batches import HeadBatch, PARTITIONS, SegmentBatch


@dataclasses.dataclass(frozen=True)
class FinetuneOptions(Options):
  """The second phase of training, for the head alone (+F)."""

  section = "segments.finetune"
  epochs: int = option(0, "epochs of the head alone, after train.epochs; 0 = none", least=0)
  learning_rate: float = option(
    2e-3, "learning rate of the head; all other options come from `optimizer`", above=0
  )


@dataclasses.dataclass(frozen=True)
class SegmentOptions(Options):
  """Graph Segment Training."""

  section = "segments"
  partition: str = option(
    "contiguous", "partition of nodes; published = ranges as in GST", one_of=tuple(PARTITIONS)
  )
  max_nodes: int = option(1000, "most nodes of a segment", least=2)
  fresh: int = option(1, "segments per graph and step with gradients", least=1)
  keep: float = option(
    1.0, "probability to keep a segment without gradients; 0 = no table", least=0, most=1
  )
  keep_unit: str = option(
    "segment",
    "unit to keep or drop: a segment for all configurations of a slate, or an entry of the table",
    one_of=("segment", "entry"),
  )
  recompute: bool = option(
    False, "compute other segments without gradients, instead of reading them from a table"
  )
  readout: str = option(
    "embedding",
    "embedding: the head scores the sum of readouts; scalar: sum of the scores of segments",
    one_of=("embedding", "scalar"),
  )
  aggregation: str = option("mean", "reduction over segments", one_of=("mean", "sum"))
  history_dtype: str = option("float32", "dtype of the table", one_of=history.DTYPES)
  finetune: FinetuneOptions = FinetuneOptions()

  def check(self) -> None:
    """Refuses (ValueError) fields that contradict each other."""
    if self.recompute and self.keep != 1:
      raise ValueError(
        f"segments.keep is {self.keep}, but segments.recompute keeps every segment: set keep to 1"
      )

  @property
  def uses_history(self) -> bool:
    """Whether training needs a history table."""
    return self.keep > 0 and not self.recompute


class SegmentModel(Precise):
  """Scores `[G, C]` of graphs from their segments.

  Attributes:
    model: a network for whole programs, see `rankers.base`.
    options: `readout`, `aggregation`, `keep` and `keep_unit` are read. The published code for
      TpuGraphs adds scores of segments (`readout="scalar"`).
  """

  model: nn.Module
  options: SegmentOptions

  @property
  def precision(self) -> str | None:
    return self.model.precision

  @property
  def max_norms(self) -> Mapping[tuple[str, ...], float]:
    return self.model.max_norms

  @property
  def compares_configs(self) -> bool:
    return self.model.compares_configs

  def setup(self):
    nn.share_scope(self, self.model)

  def __call__(self, batch: SegmentBatch | HeadBatch, *, train: bool = False) -> jax.Array:
    """Scores; training on segments sows readouts."""
    if isinstance(batch, HeadBatch):
      return self.score_totals(jnp.asarray(batch.total), batch.segments)
    graphs, fresh = batch.fresh_id.shape
    values = self.segment_readout(batch.fresh, train=train)
    values = values.reshape(graphs, fresh, *values.shape[1:])
    total = values.sum(axis=1)
    if train:
      self.sow("readout", "fresh", jax.lax.stop_gradient(values))
      weight, others = self.others(batch)
      total = weight[..., None] * total + others
    return self.score_totals(total, batch.segments)

  def segment_readout(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The values to add over segments, `[G, C, P]` float32; P = 1 for `scalar`."""
    pooled = self.model.embed(batch, train=train)
    return self.model.score(pooled)[..., None] if self.options.readout == "scalar" else pooled

  def score_totals(self, total: jax.Array, segments: Array) -> jax.Array:
    """Scores `[G, C]` of totals `[G, C, P]` over `segments [G]` segments."""
    if self.options.aggregation == "mean":
      total = total / jnp.maximum(segments, 1)[:, None, None]
    return total[..., 0] if self.options.readout == "scalar" else self.model.score(total)

  def others(self, batch: SegmentBatch) -> tuple[jax.Array, jax.Array]:
    """Weight of the fresh segments `[G, C]`, and the sum of kept segments `[G, C, P]`.

    Without stale values the sum is 0, `[]`.
    """
    graphs, fresh = batch.fresh_id.shape
    segments = batch.segments[:, None].astype(jnp.float32)
    if batch.stale is None:
      configs = batch.target.shape[1]
      return jnp.broadcast_to(segments / fresh, (graphs, configs)), jnp.zeros(())
    mask, keep = batch.stale.known_mask, self.options.keep
    weight = keep + (1 - keep) * segments / fresh
    mask = mask & self.keep_mask(graphs, mask.shape[1:])
    kept, value = (part.astype(jnp.float32) for part in (mask, batch.stale.value))
    others = jnp.einsum("gcj,gcjp->gcp", kept, value, precision="highest")
    return jnp.broadcast_to(weight, mask.shape[:2]), others

  def keep_mask(self, graphs: int, shape: Sequence[int]) -> jax.Array:
    """Mask of kept entries, `[G, C, J]` bool, or `[G, 1, J]` where configurations share it.

    The mask does not depend on the number of devices.
    """
    (configs, entries), keep = shape, self.options.keep
    if keep == 1:
      return jnp.ones((graphs, 1, entries), bool)
    rows = 1 if self.options.keep_unit == "segment" else configs
    keys = parallel.slate_keys(self.make_rng("dropout"), graphs)
    return jax.vmap(lambda key: jax.random.bernoulli(key, keep, (rows, entries)))(keys)
