"""Wraps a layout model: the score of a graph from the readouts of its segments.

Graph Segment Training (arXiv 2305.12322), with stale embedding dropout. Of a
graph's J segments a training batch has S with gradients ("fresh"). Every other
one counts with probability p, by the value at hand (stale, or recomputed):

    total = eta * sum of fresh + sum of kept others,  eta = p + (1 - p) J / S

so that the expected weight of every segment is 1. In evaluation the batch has
all segments and eta = 1. The parameters are those of the wrapped model.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax import parallel
from tpugraphs_jax.data.batching import LayoutBatch
from tpugraphs_jax.rankers.segments.batches import SegmentBatch

READOUTS = ("embedding", "scalar")
AGGREGATIONS = ("mean", "sum")
HISTORY_INITS = ("zero", "skip")
KEEP_UNITS = ("segment", "entry")
READOUT_COLLECTION = "readout"


class SegmentModel(nn.Module):
  """Scores `[G, C]` of graphs given by segments.

  Attributes:
    model: a layout ranker, see `rankers.base`.
    readout: `embedding`: readouts are added up and the head scores the total;
      `scalar`: the head scores each segment and the scores are added up
      (published code for TpuGraphs).
    aggregation: `sum`, or `mean`: divided by J.
    keep: probability p that another segment counts.
    history_init: what another segment of unknown value does: `zero`: its value is
      zero (as published); `skip`: it does not exist, and the fresh segments stand
      in for it, eta = (J - p * known others) / S.
    keep_unit: what is kept or dropped together: a `segment` for all configurations
      of the slate, or each `entry` (segment and configuration) on its own.
  """

  model: nn.Module
  readout: str = "embedding"
  aggregation: str = "mean"
  keep: float = 1.0
  history_init: str = "zero"
  keep_unit: str = "segment"

  def setup(self):
    nn.share_scope(self, self.model)

  def __call__(self, batch: SegmentBatch, *, train: bool = False) -> jax.Array:
    """Scores; in training the readouts are sown as `READOUT_COLLECTION`."""
    graphs, fresh = batch.fresh_id.shape
    values = self.segment_readout(batch.fresh, train=train)
    values = values.reshape(graphs, fresh, *values.shape[1:])
    total = values.sum(axis=1)
    if train:
      self.sow(READOUT_COLLECTION, "fresh", jax.lax.stop_gradient(values))
      weight, others = self.others(batch)
      total = weight[..., None] * total + others
    return self.head(total, batch.segments)

  def segment_readout(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """What is added up over segments, `[G, C, P]` float32; P = 1 for `scalar`."""
    pooled = self.model.embed(batch, train=train)
    return self.model.score(pooled)[..., None] if self.readout == "scalar" else pooled

  def head(self, total: jax.Array, segments: jax.Array) -> jax.Array:
    """Scores `[G, C]` of totals `[G, C, P]` over `segments [G]` segments."""
    if self.aggregation == "mean":
      total = total / jnp.maximum(segments, 1)[:, None, None]
    return total[..., 0] if self.readout == "scalar" else self.model.score(total)

  def others(self, batch: SegmentBatch) -> tuple[jax.Array, jax.Array]:
    """Weight of the fresh segments `[G, C]`, and the kept others' sum `[G, C, P]`."""
    graphs, fresh = batch.fresh_id.shape
    segments = batch.segments[:, None].astype(jnp.float32)
    if batch.stale is None:
      configs = batch.target.shape[1]
      return jnp.broadcast_to(segments / fresh, (graphs, configs)), jnp.zeros(())
    known = batch.stale.known_mask
    weight = self.keep + (1 - self.keep) * segments / fresh
    if self.history_init == "skip":
      weight = (segments - self.keep * known.sum(axis=-1)) / fresh
    kept = known & self.draw(graphs, known.shape[1:])
    others = jnp.einsum("gcj,gcjp->gcp", kept.astype(jnp.float32),
                        batch.stale.value.astype(jnp.float32), precision="highest")
    return jnp.broadcast_to(weight, known.shape[:2]), others

  def draw(self, graphs: int, shape: tuple[int, int]) -> jax.Array:
    """Which entries are kept, `[G, C, J]` or `[G, 1, J]` bool, the same on any devices."""
    configs, entries = shape
    if self.keep == 1:
      return jnp.ones((graphs, 1, entries), bool)
    rows = 1 if self.keep_unit == "segment" else configs
    keys = parallel.slate_keys(self.make_rng("dropout"), graphs)
    return jax.vmap(
        lambda key: jax.random.bernoulli(key, self.keep, (rows, entries)))(keys)


class HeadModel(nn.Module):
  """Scores of totals that are known already: trains the head alone.

  Attributes:
    segment_model: the model whose `head` this is; parameters are shared.
  """

  segment_model: SegmentModel

  def setup(self):
    nn.share_scope(self, self.segment_model)

  def __call__(self, batch, *, train: bool = False) -> jax.Array:
    """Scores `[G, C]` of a `batches.HeadBatch`."""
    del train
    return self.segment_model.head(batch.total, batch.segments)
