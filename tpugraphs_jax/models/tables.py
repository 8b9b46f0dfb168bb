"""A ranker that looks costs up: the network runs once per program.

    score(c) = sum over groups g    of unary[g, row_g(c)]
             + sum over pairs (g, h) of pair[(g, h), row_g(c), row_h(c)]

Both tables come from a graph network that sees the program alone, so that it may be
deep, and slates may have hundreds of configurations. The sums are exact; with known
costs this is the partitioned boolean quadratic problem that compilers solve for
layouts and primitives (Anderson and Gregg, CGO 2018; Liu et al., USENIX ATC 2019).
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.batch import Adjacency
from tpugraphs_jax.graph import LAYOUT_VALUE_RANGE
from tpugraphs_jax.models import layers
from tpugraphs_jax.models import message_passing as mp
from tpugraphs_jax.models import pooling
from tpugraphs_jax.models.layers import Dense
from tpugraphs_jax.table_batch import TableBatch

PAIRS = ("none", "low_rank", "full")


class ScoreTables(nn.Module):
  op_embed_dim: int = 16
  value_embed_dim: int = 4
  hidden_dim: int = 32
  num_gnns: int = 4
  pairs: str = "low_rank"
  rank: int = 8
  heads: int = 1
  dropout: float = 0.0
  weighting: str = "both"
  scale: float = 4.0
  context: bool = True
  depth: int = 1
  dtype: Any = None
  precision: Any = None

  @nn.compact
  def __call__(self, batch, *, train=False):
    unary, pair = self.tables(batch, train)
    s = column_sum(unary, batch.group_start, batch.group_code, batch.group_graph, len(batch.target))
    if pair is not None:
      s += column_sum(pair, batch.column_start, batch.column_code, batch.column_graph, len(batch.target))
    return s.sum(-1)

  @nn.compact
  def tables(self, batch, train):
    take = lambda x, i: x.at[i].get(mode="fill", fill_value=0)
    dense = lambda n, **k: Dense(n, dtype=self.dtype, precision=self.precision, **k)
    drop = nn.Dropout(self.dropout, deterministic=not train)
    H = self.hidden_dim
    graph = batch.graph
    low, high = LAYOUT_VALUE_RANGE
    x = jnp.concatenate([graph.nodes["feat"], layers.OpcodeEmbedding(self.op_embed_dim)(graph)], -1)
    x = nn.gelu(dense(H)(x))
    counts = {d: jnp.maximum(mp.degree(batch.adjacency, d, len(x)), 1)[:, None].astype(x.dtype) for d in ("operands", "users")}
    for i in range(self.num_gnns):
      t = dense(H)(x)
      for d in ("operands", "users"):
        t += mp.neighbour_sum(dense(H, use_bias=False)(x), batch.adjacency, d) / counts[d]
      t = nn.LayerNorm(dtype=self.dtype)(t)
      x = x + drop(nn.gelu(t))
    u = batch.unary
    values = jnp.asarray(batch.rows, jnp.int32) - low
    e = nn.Embed(high - low + 1, self.value_embed_dim)(values).reshape(len(values), -1)
    sign = jnp.sign(batch.rows[:, ::6] - batch.rows[:, 1::6])
    e = jnp.concatenate([e, sign], -1)
    erow = take(e, u.row)  # [T, .]
    # unary
    ch = dense(H)(x)
    if self.context:
      graph_of = mp.node_graph(graph)
      g = pooling.graph_sum(x, graph_of, len(batch.target)) / jnp.maximum(pooling.real_nodes(graph), 1)[:, None]
      ch += pooling.per_node(dense(H, use_bias=False)(g), graph_of)
    z = take(ch, u.choice_node) + take(dense(H, use_bias=False)(erow), u.choice_term) + dense(H, use_bias=False)(u.choice_feat)
    z = drop(nn.gelu(z))
    for i in range(self.depth):
      z = nn.gelu(dense(H)(z))
    heads = 2 * self.heads
    z = dense(heads)(z)
    w = u.choice_weight[:, None]
    n = jnp.sqrt(jnp.bincount(batch.group_graph, length=len(batch.target)).astype(jnp.float32))
    flat = (u.choice_weight > 0)[:, None] * 0.1
    both = lambda z, w, f: (z[:, ::2] * w if self.weighting != "flat" else 0) + (z[:, 1::2] * f if self.weighting != "bytes" else 0)
    unary = jnp.zeros((len(u.row), self.heads)).at[u.choice_term].add(both(z, w, flat), mode="drop", indices_are_sorted=True) * self.scale
    if self.pairs == "none":
      return unary, None
    p = batch.pairs
    zp = sum(take(dense(H, use_bias=False)(x), p.ends[:, i]) for i in range(3)) + dense(H)(p.feat)
    zp = drop(nn.gelu(zp))
    for i in range(self.depth):
      zp = nn.gelu(dense(H)(zp))
    R = self.rank
    gate = dense(2 * R * self.heads)(zp).reshape(-1, 2, R * self.heads)
    gate = both(gate.transpose(0, 1, 2).reshape(len(zp), 2, -1).reshape(len(zp), -1), 0, 0) if False else gate
    gate = gate[:, 0] * p.weight[:, None] + gate[:, 1] * (p.weight > 0)[:, None] * 0.1
    turned = jnp.asarray(p.is_turned)[:, None]
    gate = jnp.concatenate([jnp.where(turned, 0, gate), jnp.where(turned, gate, 0)], -1)
    col = jnp.zeros((len(batch.column_start), gate.shape[1])).at[p.pair_column].add(gate, mode="drop", indices_are_sorted=True)
    # factors of each group's choice
    hn = take(dense(H)(x), u.choice_node)
    cnt = jnp.zeros((len(u.row), 1)).at[u.choice_term].add((u.choice_weight > 0)[:, None].astype(jnp.float32), mode="drop")
    hn = jnp.zeros((len(u.row), H)).at[u.choice_term].add(hn, mode="drop", indices_are_sorted=True) / jnp.maximum(cnt, 1)
    f = nn.gelu(hn + dense(H)(erow))
    f = dense(2 * R * self.heads)(f)
    A, B = jnp.split(f, 2, -1)
    a, b = take(f, p.choices[:, 0]), take(f, p.choices[:, 1])
    swap = lambda v: jnp.concatenate([v[:, v.shape[1] // 2:], v[:, :v.shape[1] // 2]], -1)
    v = a * swap(b) * take(col, p.column)  # [V, 2*R*heads]
    v = v.reshape(len(v), 2, R, self.heads).sum((1, 2))
    return unary, v * self.scale


def column_sum(costs, start, code, graph_of, graphs):
  """Sums costs of terms."""
  index = start[:, None] + code.astype(jnp.int32)
  values = costs.at[index].get(mode="fill", fill_value=0)  # [B, C, heads]
  return pooling.graph_sum(values, graph_of, graphs)
