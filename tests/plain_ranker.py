"""A layout ranker on plain arrays, as a user would write it."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layers, plain
from tpugraphs_jax.rankers import base


@base.LAYOUT_MODELS.register("PlainSAGE")
class PlainSAGE(base.Network):
  """Rounds of `x + gelu(W [x, mean of operands])`."""

  hidden_dim: int = 32
  num_gnns: int = 2

  def setup(self):
    self.op_embedding = layers.OpcodeEmbedding(self.hidden_dim)
    self.join = nn.Dense(self.hidden_dim)
    self.sage = [nn.Dense(self.hidden_dim) for _ in range(self.num_gnns)]
    self.head = nn.Dense(1)

  def embed(self, batch, *, train=False):
    config, graph = plain.node_configs(batch), batch.graph
    static = jnp.concatenate([graph.nodes["feat"], self.op_embedding(graph)], axis=-1)
    static = jnp.broadcast_to(static[:, None], (*config.shape[:2], static.shape[-1]))
    x = nn.gelu(self.join(jnp.concatenate([static, config], axis=-1)))
    sum_operands = lambda x: jax.ops.segment_sum(x[graph.senders], graph.receivers, len(x))
    count = jnp.maximum(sum_operands(jnp.ones((len(x), 1, 1))), 1)
    for dense in self.sage:
      x += nn.gelu(dense(jnp.concatenate([x, sum_operands(x) / count], axis=-1)))
    configurable = plain.graph_max(x, batch, where=plain.is_configurable(batch))
    return jnp.concatenate([plain.graph_mean(x, batch), configurable], axis=-1)

  def score(self, readout):
    return self.head(readout)[..., 0]
