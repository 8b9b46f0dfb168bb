"""The plain jraph formulation of the layout rankers, which the benchmarks compare with.

Every node carries every configuration, `[N, C, F]`, from the first layer on. Neighbours
are summed by `jax.ops.segment_sum` over the edges of the `GraphsTuple`, in no particular
order. Nothing is shared between configurations. The functions take the parameters of the
Flax models and return the same scores, so that both can be compared and timed. They use
no code of `tpugraphs_jax.nn` or `tpugraphs_jax.rankers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from tpugraphs_jax.data.batching import ABSENT, LayoutBatch


class PlainLayoutBatch(NamedTuple):
  """Programs with decoded configurations of their configurable nodes."""

  graph: jraph.GraphsTuple
  config_node: np.ndarray  # [K] int32 node, or ABSENT
  config_feat: np.ndarray  # [K, C, F] float32
  block_mask: np.ndarray  # [N] bool, True on nodes of the sampled block
  target: np.ndarray  # [G, C] float32
  config_mask: np.ndarray  # [G, C] bool


def from_layout(batch: LayoutBatch, seed: int = 0) -> PlainLayoutBatch:
  """The same programs with all configuration rows decoded; padding rows become zeros."""
  is_given = batch.row_id < len(batch.rows)
  rows = batch.rows[np.minimum(batch.row_id, len(batch.rows) - 1)]
  return PlainLayoutBatch(
    _shuffle_edges(batch.graph, seed),
    np.where(is_given.any(axis=1), batch.by_hop.nodes[0], ABSENT).astype(np.int32),
    np.where(is_given[..., None], rows, 0).astype(np.float32),
    batch.block_mask,
    batch.target,
    batch.config_mask,
  )


def _shuffle_edges(graph: jraph.GraphsTuple, seed: int) -> jraph.GraphsTuple:
  order = np.random.default_rng(seed).permutation(len(graph.senders))
  return graph._replace(senders=graph.senders[order], receivers=graph.receivers[order])


def res_model(
  params: Any,
  batch: PlainLayoutBatch,
  *,
  layers: int = 2,
  normalization: str = "sym",
  dropout: str = "backpropdropout",
) -> jax.Array:
  """Training scores `[G, C]` of the official layout model, with options as in `ResModel`."""
  block = jnp.asarray(batch.block_mask, jnp.float32)
  everything = jnp.ones_like(block)
  encode = lambda keep: _res_encode(params, batch, keep, layers, normalization)
  if dropout == "fullgraph":
    return _res_readout(params, encode(everything), batch, everything)
  x = encode(block)
  if dropout == "backpropdropout":
    full = jax.lax.stop_gradient(encode(everything))
    x = jnp.where(batch.block_mask[:, None, None], x, full)
  return _res_readout(params, x, batch, block)


def _res_encode(params, batch: PlainLayoutBatch, keep, layers, normalization) -> jax.Array:
  graph, configs = batch.graph, batch.config_feat.shape[1]
  config = 100.0 * keep[:, None, None] * _on_nodes(batch.config_feat, batch)
  static = [
    _per_config(graph.nodes["feat"], configs),
    _per_config(_embedding(params, graph), configs),
  ]
  x = _dense(params["pre_0"], jnp.concatenate([config, *static], axis=-1))
  x = _leaky_relu(_dense(params["pre_1"], _leaky_relu(x)))
  edge_weight = (keep[graph.senders] * keep[graph.receivers])[:, None, None]
  propagate = _symmetric if normalization == "sym" else _asymmetric
  for layer in range(layers):
    joined = propagate(jnp.concatenate([config, x], axis=-1), graph, edge_weight)
    update = _leaky_relu(_dense(params[f"update_0_{layer}"], joined))
    x += _leaky_relu(_dense(params[f"update_1_{layer}"], update))
  return x


def _symmetric(y: jax.Array, graph: jraph.GraphsTuple, edge_weight: jax.Array) -> jax.Array:
  """`D^-1/2 (A + A^T + I) D^-1/2 y`."""
  nodes = len(y)
  degree = 1 + (
    jax.ops.segment_sum(edge_weight, graph.receivers, nodes)
    + jax.ops.segment_sum(edge_weight, graph.senders, nodes)
  )
  y = y * jax.lax.rsqrt(degree)
  total = (
    y
    + jax.ops.segment_sum(edge_weight * y[graph.senders], graph.receivers, nodes)
    + jax.ops.segment_sum(edge_weight * y[graph.receivers], graph.senders, nodes)
  )
  return total * jax.lax.rsqrt(degree)


def _asymmetric(y: jax.Array, graph: jraph.GraphsTuple, edge_weight: jax.Array) -> jax.Array:
  """Means over (users, self) and over (operands, self), concatenated."""
  means = []
  for here, there in ((graph.senders, graph.receivers), (graph.receivers, graph.senders)):
    count = 1 + jax.ops.segment_sum(edge_weight, here, len(y))
    means.append((y + jax.ops.segment_sum(edge_weight * y[there], here, len(y))) / count)
  return jnp.concatenate(means, axis=-1)


def _res_readout(params, x, batch: PlainLayoutBatch, keep) -> jax.Array:
  graph = batch.graph
  total = _pool(x, graph)
  chosen = _is_configurable(batch) * keep
  configurable = _pool(x * chosen[:, None, None], graph)
  mean = total / jnp.maximum(graph.n_node[:-1], 1)[:, None, None]
  pooled = [mean, _l2_normalize(total), _l2_normalize(configurable)]
  return _mlp(params["head"], jnp.concatenate(pooled, axis=-1), _leaky_relu)[..., 0]


def layout_sage(
  params: Any,
  batch: PlainLayoutBatch,
  *,
  layers: int = 3,
  pooling: tuple[str, ...] = ("mean", "config_mean", "config_max"),
) -> jax.Array:
  """Scores `[G, C]` of the layout `SAGE` with its default options."""
  graph, configs = batch.graph, batch.config_feat.shape[1]
  table = params["layout_value"]["embedding"]
  values = jnp.asarray(batch.config_feat, jnp.int32) + 1  # Values start at -1.
  embedded = table[values].reshape(*values.shape[:2], -1)
  static = jnp.concatenate([graph.nodes["feat"], _embedding(params, graph)], axis=-1)
  joined = jnp.concatenate([_per_config(static, configs), _on_nodes(embedded, batch)], axis=-1)
  kernel = jnp.concatenate([params["static"]["kernel"], params["config"]["kernel"]])
  x = joined @ kernel + params["static"]["bias"][None, None]
  x += (1 - _is_configurable(batch))[:, None, None] * params["sentinel"].reshape(1, 1, -1)
  x = jax.nn.gelu(x)
  for layer in range(layers):
    x += jax.nn.gelu(_sage_round(params[f"sage_{layer}"], x, graph))
  pooled = [_sage_pool(x, batch, kind) for kind in pooling]
  return _mlp(params["head"], jnp.concatenate(pooled, axis=-1), jax.nn.gelu)[..., 0]


def _sage_round(params, x: jax.Array, graph: jraph.GraphsTuple) -> jax.Array:
  total = _dense(params["self"], x)
  for name, here, there in (
    ("operands", graph.receivers, graph.senders),
    ("users", graph.senders, graph.receivers),
  ):
    count = jax.ops.segment_sum(jnp.ones(len(here)), here, len(x))
    mean = jax.ops.segment_sum(x[there], here, len(x))
    mean /= jnp.maximum(count, 1)[:, None, None]
    total += mean @ params[name]["kernel"]
  mean = total.mean(axis=-1, keepdims=True)
  deviation = total - mean
  variance = jnp.square(deviation).mean(axis=-1, keepdims=True)
  normal = deviation * jax.lax.rsqrt(variance + 1e-6)
  return normal * params["norm"]["scale"][None, None] + params["norm"]["bias"][None, None]


def _sage_pool(x, batch: PlainLayoutBatch, kind: str) -> jax.Array:
  graph = batch.graph
  graphs = len(graph.n_node) - 1
  chosen = jnp.ones(len(x))
  if kind.startswith("config_"):
    chosen = _is_configurable(batch)
  chosen = chosen[:, None, None]
  if kind.endswith("max"):
    largest = jax.ops.segment_max(jnp.where(chosen > 0, x, -jnp.inf), _graph_of(graph), graphs + 1)[
      :-1
    ]
    return jnp.where(jnp.isfinite(largest), largest, 0)
  total = _pool(x * chosen, graph)
  return total / jnp.maximum(_pool(chosen, graph), 1) if kind.endswith("mean") else total / 100


def _graph_of(graph: jraph.GraphsTuple) -> jax.Array:
  """Graph of each node, `[N]`; padding nodes belong to the last graph."""
  nodes = len(graph.nodes["opcode"])
  return jnp.repeat(jnp.arange(len(graph.n_node)), graph.n_node, total_repeat_length=nodes)


def _pool(x: jax.Array, graph: jraph.GraphsTuple) -> jax.Array:
  """Sum over the nodes of each graph, without the padding graph."""
  return jax.ops.segment_sum(x, _graph_of(graph), len(graph.n_node))[:-1]


def _per_config(x: jax.Array, configs: int) -> jax.Array:
  return jnp.broadcast_to(x[:, None], (len(x), configs, x.shape[1]))


def _on_nodes(config_feat: jax.Array, batch: PlainLayoutBatch) -> jax.Array:
  """Features of configurable nodes `[K, C, F]` at their nodes, zeros elsewhere: `[N, C, F]`."""
  nodes = len(batch.graph.nodes["opcode"])
  zeros = jnp.zeros((nodes, *config_feat.shape[1:]))
  return zeros.at[batch.config_node].add(config_feat, mode="drop")


def _is_configurable(batch: PlainLayoutBatch) -> jax.Array:
  nodes = len(batch.graph.nodes["opcode"])
  return jnp.zeros(nodes).at[batch.config_node].set(1, mode="drop")


def _embedding(params, graph: jraph.GraphsTuple) -> jax.Array:
  return params["op_embedding"]["table"]["embedding"][graph.nodes["opcode"]]


def _dense(params, x: jax.Array) -> jax.Array:
  x = x @ params["kernel"]
  return x + params["bias"].reshape((1,) * (x.ndim - 1) + (-1,)) if "bias" in params else x


def _mlp(params, x: jax.Array, activation) -> jax.Array:
  for i in range(len(params)):
    x = _dense(params[f"Dense_{i}"], activation(x) if i else x)
  return x


def _leaky_relu(x: jax.Array) -> jax.Array:
  return jnp.where(x >= 0, x, 0.2 * x)


def _l2_normalize(x: jax.Array) -> jax.Array:
  square = jnp.square(x).sum(axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-12))
