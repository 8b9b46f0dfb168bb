"""Sequences through linear recurrences, in chunks or by long convolutions."""

from _steps import array, forward, train
from flax import linen as nn
import jax
import jax.numpy as jnp

SPLIT = "test"


class Chunked(nn.Module):
  """Linear attention with a decay: quadratic inside a chunk, a state between chunks."""

  chunk: int
  heads: int

  @nn.compact
  def __call__(self, x):
    batch, length, width = x.shape
    query, key, value = (
      nn.Dense(width, use_bias=False)(x).reshape(
        batch, length // self.chunk, self.chunk, self.heads, width // self.heads
      )
      for _ in range(3)
    )
    inside = (
      jnp.einsum("bnihd,bnjhd->bnhij", query, key)
      * jnp.tril(jnp.ones((self.chunk, self.chunk)))[None, None, None]
    )
    near = jnp.einsum("bnhij,bnjhd->bnihd", inside, value)
    states = jnp.einsum("bnjhd,bnjhe->nbhde", key, value)
    _, before = jax.lax.scan(
      lambda state, new: (0.9 * state + new, state), jnp.zeros_like(states[0]), states
    )
    far = jnp.einsum("bnihd,nbhde->bnihe", query, before)
    return x + nn.Dense(width)((near + far).reshape(x.shape))


class Selective(nn.Module):
  """A short convolution, then a gated diagonal recurrence by an associative scan."""

  width: int

  @nn.compact
  def __call__(self, x):
    y, gate = jnp.split(nn.Dense(2 * self.width)(x), 2, -1)
    y = nn.swish(nn.Conv(self.width, (4,), feature_group_count=self.width, padding="CAUSAL")(y))
    decay = nn.sigmoid(nn.Dense(self.width)(y))

    def combined(first, second):
      return first[0] * second[0], first[1] * second[0] + second[1]

    _, y = jax.lax.associative_scan(combined, (decay, (1 - decay) * y), axis=1)
    return x + nn.Dense(x.shape[-1])(y * nn.swish(gate))


PROGRAMS = {
  "chunked_train": train(Chunked(16, 2), array(3, 80, 64)),
  "selective": forward(Selective(96), array(4, 51, 64)),
}
