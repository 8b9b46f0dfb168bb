"""More families of drawn programs: blocks in which the compiler's own layouts can be bettered.

Grouped and depthwise convolutions, batched products of attention, interaction layers, and
the reshapes around them. `programs` draws from the families of `_families` as well.
"""

from _families import (
  activation,
  conv,
  dense,
  family,
  feed,
  flat,
  heads,
  norm,
  picture,
  pool,
  programs,
  sequence,
  up,
)
from _steps import array, indices
import jax
from jax import lax
import jax.numpy as jnp

__all__ = ["programs"]


# Convolutions.


@family
def cardinal(draw):
  """A residual block with a grouped convolution in its middle (ResNeXt)."""
  groups, width, wide = draw.choice([4, 8, 16]), draw.choice([32, 64]), draw.choice([64, 96])
  act, stride = activation(draw), draw.choice([1, 1, 2])

  def model(new, x):
    y = act(norm(new, conv(new, x, width, 1)))
    y = act(norm(new, conv(new, y, width, 3, stride, groups=groups)))
    return act(conv(new, y, wide, 1) + conv(new, x, wide, 1, stride))

  return model, picture(draw, channels=(16, 32, 48), sizes=(12, 14, 16, 20))


@family
def large_kernel(draw):
  """A patch stem and a block with a large depthwise convolution (ConvNeXt)."""
  width, kernel, act = draw.choice([24, 32, 48]), draw.choice([5, 7]), activation(draw)
  side = draw.choice([2, 4])

  def model(new, x):
    x = norm(new, conv(new, x, width, side, side, padding="VALID"))
    y = norm(new, conv(new, x, width, kernel, groups=width))
    return x + new(width) * feed(new, y, act)

  return model, picture(draw, channels=(3, 8), sizes=(24, 32, 40))


@family
def inverted(draw):
  """An inverted residual with a depthwise convolution (MobileNet)."""
  times, kernel, stride = draw.choice([2, 4, 6]), draw.choice([3, 5]), draw.choice([1, 2])
  act, narrow = activation(draw), draw.choice([16, 24, 40])

  def model(new, x):
    wide = times * x.shape[-1]
    y = act(norm(new, conv(new, x, wide, 1)))
    y = act(norm(new, conv(new, y, wide, kernel, stride, groups=wide)))
    return conv(new, y, narrow, 1)

  return model, picture(draw, channels=(8, 16, 24), sizes=(12, 14, 20, 28))


@family
def separable(draw):
  """Depthwise and pointwise convolutions in turn, and a classifier (Xception)."""
  widths, act = [draw.choice([16, 24, 32, 64]) for _ in range(draw.randint(1, 2))], activation(draw)

  def model(new, x):
    for width in widths:
      x = conv(new, conv(new, x, x.shape[-1], 3, groups=x.shape[-1]), width, 1)
      x = act(norm(new, x, (0, 1, 2)))
    return dense(new, flat(pool(x)), 10)

  return model, picture(draw, channels=(8, 16, 32), sizes=(12, 16, 20))


@family
def group_normed(draw):
  """Convolutions normalised over groups of channels, with reshapes."""
  groups, width, act = draw.choice([2, 4]), draw.choice([16, 32, 48]), activation(draw)

  def normed(x):
    y = x.reshape(*x.shape[:3], groups, -1)
    y = y - y.mean((1, 2, 4), keepdims=True)
    return (y * lax.rsqrt((y * y).mean((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape)

  def model(new, x):
    x = act(normed(conv(new, x, width)))
    return x + act(normed(conv(new, x, width)))

  return model, picture(draw, sizes=(12, 16, 20))


@family
def ladder(draw):
  """Two levels down and up with skip connections (U-Net)."""
  width, act = draw.choice([8, 12, 16]), activation(draw)

  def model(new, x):
    first = act(conv(new, x, width))
    second = act(conv(new, pool(first), 2 * width))
    x = act(conv(new, pool(second), 4 * width))
    x = act(conv(new, jnp.concatenate([second, up(new, x, 2 * width)], -1), 2 * width))
    x = act(conv(new, jnp.concatenate([first, up(new, x, width)], -1), width))
    return conv(new, x, 3, 1)

  return model, picture(draw, channels=(1, 3, 8), sizes=(16, 24, 32))


@family
def connected(draw):
  """A dense block with narrow layers and a transition (DenseNet)."""
  growth, depth, act = draw.choice([8, 12, 16]), draw.randint(2, 3), activation(draw)

  def model(new, x):
    for _ in range(depth):
      y = conv(new, act(norm(new, x, (0, 1, 2))), 4 * growth, 1)
      x = jnp.concatenate([x, conv(new, act(norm(new, y, (0, 1, 2))), growth)], -1)
    x = pool(conv(new, act(x), x.shape[-1] // 2, 1))
    return dense(new, x.mean((1, 2)), 10)

  return model, picture(draw, channels=(16, 24, 32), sizes=(12, 16, 20))


@family
def causal_waves(draw):
  """Gated, dilated and causal convolutions over time (WaveNet)."""
  width, skip, depth = draw.choice([16, 24, 32]), draw.choice([16, 32, 48]), draw.randint(2, 3)
  kernel = draw.choice([2, 3])

  def model(new, x):
    x, total = dense(new, x, width), 0
    for layer in range(depth):
      reach = (kernel - 1) * 2**layer
      y = conv(new, x, 2 * width, kernel, dilation=2**layer, padding=[(reach, 0)])
      y = jnp.tanh(y[..., :width]) * jax.nn.sigmoid(y[..., width:])
      total, x = total + dense(new, y, skip), x + dense(new, y, width)
    return dense(new, jax.nn.relu(total), 64)

  return model, array(draw.choice([1, 4, 8]), draw.choice([64, 100, 128]), draw.choice([1, 8, 32]))


# Products.


@family
def fused_attention(draw):
  """A block of a language model: one product for queries, keys and values (GPT)."""
  count, act, words = draw.choice([2, 4, 8]), activation(draw), draw.choice([100, 300])
  width = draw.choice([32, 64, 128])

  def model(new, ids):
    table = new(words, width)
    x = table[ids] + new(ids.shape[1], width)
    q, k, v = jnp.moveaxis(
      dense(new, norm(new, x), 3 * width).reshape(*ids.shape, 3, count, -1), 2, 0
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e4)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + dense(new, mixed.reshape(x.shape), width)
    x = x + feed(new, norm(new, x), act)
    return x @ table.T

  return model, indices(draw.choice([2, 4, 8]), draw.choice([16, 32, 50, 64]))


@family
def shared_keys(draw):
  """Attention in which several heads share keys and values."""
  count, share = draw.choice([2, 4]), draw.choice([2, 4])
  width = draw.choice([8, 16, 32])

  def model(new, x):
    b, length, _ = x.shape
    q = dense(new, x, count * share * width).reshape(b, length, count, share, width)
    k, v = (dense(new, x, count * width).reshape(b, length, count, width) for _ in range(2))
    scores = jax.nn.softmax(jnp.einsum("bqgsd,bkgd->bgsqk", q, k))
    mixed = jnp.einsum("bgsqk,bkgd->bqgsd", scores, v)
    return dense(new, mixed.reshape(b, length, -1), x.shape[-1])

  return model, sequence(draw, (32, 64, 96))


@family
def axial(draw):
  """Attention along the rows and then along the columns of a picture."""
  count = draw.choice([2, 4])

  def model(new, x):
    b, h, w, c = x.shape
    y = x.reshape(b * h, w, c)
    x = x + heads(new, y, y, count).reshape(x.shape)
    y = x.swapaxes(1, 2).reshape(b * w, h, c)
    return x + heads(new, y, y, count).reshape(b, w, h, c).swapaxes(1, 2)

  return model, picture(draw, channels=(16, 32, 48), sizes=(8, 12, 16))


@family
def looking_across(draw):
  """Two layers of attention to another sequence, with norms of both (a decoder)."""
  count, act = draw.choice([2, 4]), activation(draw)

  def model(new, x, memory):
    memory = norm(new, memory)
    y = norm(new, x)
    x = x + heads(new, y, y, count, is_causal=True)
    x = x + heads(new, norm(new, x), memory, count)
    return x + feed(new, norm(new, x), act, 2)

  x = sequence(draw, (32, 64))
  return model, x, array(x.shape[0], draw.choice([8, 40, 77]), draw.choice([24, 64]))


@family
def dots_of_fields(draw):
  """Products of every two embeddings beside dense features (DLRM)."""
  rank, act, fields = draw.choice([8, 16, 32]), activation(draw), draw.choice([4, 8, 12])
  words, hidden = draw.choice([100, 500]), draw.choice([32, 64])

  def model(new, ids, x):
    x = act(dense(new, act(dense(new, x, hidden)), rank))
    rows = jnp.concatenate([x[:, None], new(words, rank)[ids]], 1)
    products = jnp.einsum("bir,bjr->bij", rows, rows)
    first, second = jnp.triu_indices(fields + 1, 1)
    x = jnp.concatenate([x, products[:, first, second]], -1)
    return dense(new, act(dense(new, x, hidden)), 1)

  batch = draw.choice([16, 64, 100])
  return model, indices(batch, fields), array(batch, draw.choice([13, 32]))


@family
def compressed_fields(draw):
  """A few mixtures of the embeddings, multiplied with all of them."""
  rank, few, fields = draw.choice([8, 16, 24]), draw.choice([2, 4]), draw.choice([8, 12, 20])
  act, words = activation(draw), draw.choice([100, 300])

  def model(new, ids):
    rows = new(words, rank)[ids]
    mixed = jnp.einsum("bfr,fm->bmr", rows, new(fields, few))
    x = flat(jnp.einsum("bfr,bmr->bfm", rows, mixed))
    return dense(new, act(dense(new, x, 64)), 1)

  return model, indices(draw.choice([16, 64, 128]), fields)


@family
def routed(draw):
  """Experts for groups of tokens with a capacity, by products with one-hot matrices."""
  count, act, inner = draw.choice([2, 4, 8]), activation(draw), draw.choice([32, 64])

  def model(new, x):
    b, length, width = x.shape
    share = jax.nn.softmax(dense(new, x, count))
    place = jax.nn.one_hot(jnp.argmax(share, -1), count, dtype=x.dtype)
    routed = jnp.einsum("ble,blf->ebf", place, x).reshape(count, -1, width)
    y = act(jnp.einsum("enf,efi->eni", routed, new(count, width, inner)))
    y = jnp.einsum("eni,eif->enf", y, new(count, inner, width))
    return x + jnp.einsum("ble,ebf->blf", place * share, y.reshape(count, b, width))

  return model, sequence(draw, (32, 64))


@family
def messages(draw):
  """Graph convolutions with a normalised adjacency, and a readout (GCN)."""
  layers, act = [draw.choice([16, 32, 48]) for _ in range(2)], activation(draw)
  nodes = draw.choice([24, 40, 64, 100])

  def model(new, x, links):
    degree = lax.rsqrt(links.sum(-1) + 1)
    links = links * degree[..., None] * degree[..., None, :]
    for width in layers:
      x = act(links @ dense(new, x, width))
    return dense(new, x.mean(-2), 7)

  batch = draw.choice([1, 4, 8])
  return model, array(batch, nodes, draw.choice([16, 32])), array(batch, nodes, nodes)


@family
def gated_recurrence(draw):
  """A recurrence with three gates from one product (GRU), unrolled by a scan."""
  state, layers = draw.choice([16, 32, 64]), draw.randint(1, 2)

  def model(new, x):
    for _ in range(layers):
      inputs, inner = dense(new, x, 3 * state), new(state, 3 * state)

      def turn(h, each, inner=inner):
        r, z, n = jnp.split(each, 3, -1)
        hr, hz, hn = jnp.split(h @ inner, 3, -1)
        z = jax.nn.sigmoid(z + hz)
        h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h
        return h, h

      _, states = lax.scan(turn, jnp.zeros((len(x), state), x.dtype), inputs.swapaxes(0, 1))
      x = states.swapaxes(0, 1)
    return dense(new, x, 20)

  return model, sequence(draw, (16, 32, 64))


@family
def outer_products(draw):
  """Outer products of two sequences, averaged, and a linear map of the flat result."""
  rank, out = draw.choice([8, 16, 24]), draw.choice([8, 16, 32])

  def model(new, x, y):
    x, y = dense(new, x, rank), dense(new, y, rank)
    product = jnp.einsum("bsi,btj->bstij", x, y)
    return dense(new, product.reshape(*product.shape[:3], -1), out).mean((1, 2))

  batch, width = draw.choice([2, 4]), draw.choice([16, 32])
  return model, array(batch, draw.choice([8, 16]), width), array(batch, draw.choice([8, 12]), width)
