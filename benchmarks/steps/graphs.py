"""Graph networks and recommenders: segments of edges, tables of ids."""

from __future__ import annotations

from _arrays import bf16, f32, i32, parameters, state, training
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

NODES, EDGES, WIDTH = 2_048, 8_192, 128


class Convolution(nn.Module):
  """Two layers of a graph convolutional network."""

  @nn.compact
  def __call__(self, x, senders, receivers):
    ones = jnp.ones(len(senders))
    degree = jax.ops.segment_sum(ones, receivers, len(x)) + 1
    for _ in range(2):
      y = nn.Dense(WIDTH)(x) * jax.lax.rsqrt(degree)[:, None]
      sums = jax.ops.segment_sum(y[senders], receivers, len(x))
      x = nn.relu((sums + y) * jax.lax.rsqrt(degree)[:, None])
    return nn.Dense(16)(x)


class Attention(nn.Module):
  """A graph attention layer."""

  @nn.compact
  def __call__(self, x, senders, receivers):
    x = nn.Dense(WIDTH)(x)
    scores = nn.leaky_relu(nn.Dense(1)(x)[senders] + nn.Dense(1)(x)[receivers])
    scores = jnp.exp(scores - jax.ops.segment_max(scores, receivers, len(x))[receivers])
    sums = jax.ops.segment_sum(scores, receivers, len(x))
    parts = scores / (sums[receivers] + 1e-9)
    return nn.Dense(16)(jax.ops.segment_sum(parts * x[senders], receivers, len(x)))


class Messages(nn.Module):
  """Messages of edges with features, as jraph's networks pass them."""

  @nn.compact
  def __call__(self, x, senders, receivers, edges):
    for _ in range(2):
      inputs = jnp.concatenate((x[senders], x[receivers], edges), -1)
      edges = edges + nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(inputs)))
      sums = jax.ops.segment_sum(edges, receivers, len(x))
      x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(jnp.concatenate((x, sums), -1))))
    return nn.Dense(16)(x)


GRAPH = (f32(NODES, WIDTH), i32(EDGES), i32(EDGES))


def nodes(model, *inputs):
  """Training on the labels of nodes."""
  optimizer = optax.adam(1e-2)
  params = parameters(model, *inputs)

  def loss(params, labels, *inputs):
    logits = model.apply(params, *inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  return training(loss, optimizer), (params, state(optimizer, params), i32(NODES), *inputs)


def sample_neighbours(starts, neighbours, chosen, key):
  """Ten neighbours of each node, of compressed rows."""
  first, count = starts[chosen], starts[chosen + 1] - starts[chosen]
  drawn = jax.random.randint(key, (len(chosen), 10), 0, 1 << 30) % jnp.maximum(count, 1)[:, None]
  return neighbours[first[:, None] + drawn]


class Recommender(nn.Module):
  """DLRM: tables, products of all pairs, a network."""

  tables: int = 8
  rows: int = 10_000

  @nn.compact
  def __call__(self, numbers, ids):
    make = nn.initializers.normal(0.01)
    table = self.param("tables", make, (self.tables, self.rows, 64))
    rows = jax.vmap(lambda table, ids: table[ids], (0, 1), 1)(table, ids)
    dense = nn.relu(nn.Dense(64)(nn.relu(nn.Dense(128)(numbers))))
    all_ = jnp.concatenate((dense[:, None], rows), 1)
    pairs = jnp.einsum("bid,bjd->bij", all_, all_)
    lower = jnp.tril_indices(self.tables + 1, -1)
    x = jnp.concatenate((dense, pairs[:, lower[0], lower[1]]), -1)
    return nn.Dense(1)(nn.relu(nn.Dense(256)(x)))[:, 0]


def clicks(model, *inputs, optimizer=None):
  optimizer = optimizer or optax.adagrad(1e-2)
  params = parameters(model, *inputs)

  def loss(params, clicked, *inputs):
    return optax.sigmoid_binary_cross_entropy(model.apply(params, *inputs), clicked).mean()

  labels = f32(inputs[0].shape[0])
  return training(loss, optimizer), (params, state(optimizer, params), labels, *inputs)


class Factorisation(nn.Module):
  """A factorisation machine over hashed features."""

  @nn.compact
  def __call__(self, ids):
    rows = nn.Embed(50_000, 16)(ids)
    pairs = jnp.square(rows.sum(1)) - jnp.square(rows).sum(1)
    return nn.Embed(50_000, 1)(ids).sum((1, 2)) + 0.5 * pairs.sum(-1)


class Towers(nn.Module):
  """Users and items, trained with the other items of a batch as negatives."""

  @nn.compact
  def __call__(self, users, items):
    tower = lambda ids, rows: nn.Dense(64)(nn.relu(nn.Dense(128)(nn.Embed(rows, 64)(ids).mean(1))))
    user, item = tower(users, 20_000), tower(items, 10_000)
    logits = user @ item.T / 0.1
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(user))).mean()


def towers():
  model, optimizer = Towers(), optax.adam(1e-3)
  arrays = (i32(1_024, 4), i32(1_024, 2))
  params = parameters(model, *arrays)
  return training(model.apply, optimizer), (params, state(optimizer, params), *arrays)


def nearest(queries, items):
  """Retrieval of the best items of each query."""
  return jax.lax.approx_max_k(queries @ items.T, 100)


PROGRAMS = {
  "convolution": nodes(Convolution(), *GRAPH),
  "attention": nodes(Attention(), *GRAPH),
  "messages": nodes(Messages(), *GRAPH, f32(EDGES, WIDTH)),
  "sample_neighbours": (
    sample_neighbours,
    (i32(NODES + 1), i32(EDGES), i32(512), jax.eval_shape(lambda: jax.random.key(0))),
  ),
  "recommender": clicks(Recommender(), f32(1_024, 13), i32(1_024, 8)),
  "factorisation": clicks(Factorisation(), i32(1_024, 20)),
  "towers": towers(),
  "nearest": (nearest, (bf16(64, 128), bf16(100_000, 128))),
}
