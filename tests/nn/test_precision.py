"""Layers of flax and their gradients take the precision of the module around them."""

from __future__ import annotations

import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import pytest

from tpugraphs_jax.nn.layers import Precise


class Network(Precise):
  """Attention, an LSTM, a linear layer and a convolution, none with a precision of its own."""

  precision: str | None = None

  def setup(self):
    self.attention = nn.MultiHeadDotProductAttention(num_heads=2)
    self.lstm = nn.RNN(nn.OptimizedLSTMCell(8))
    self.convolution = nn.Conv(8, (3,))

  def __call__(self, x):
    return jnp.sum(self.convolution(self.lstm(self.attention(x))) @ jnp.ones((8, 1)))

  def last(self, x):
    return jnp.sum(self.convolution(x))


def _precisions(network, **options):
  x = jnp.ones((2, 5, 8))
  variables = jax.eval_shape(network.init, jax.random.key(0), x)
  value = lambda variables, x: network.apply(variables, x, **options)
  text = jax.jit(jax.value_and_grad(value)).lower(variables, x).as_text()
  lines = [line for line in text.splitlines() if re.search(r"dot_general|convolution", line)]
  assert lines
  return {found for line in lines for found in re.findall(r"DEFAULT|HIGHEST|HIGH", line)}


@pytest.mark.parametrize("options", [{}, {"method": "last"}])
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_every_product_and_its_gradient_has_the_precision(precision, options):
  assert _precisions(Network(precision), **options) == {precision.upper()}


def test_without_one_products_are_as_jax_is_configured():
  assert _precisions(Network()) == {"DEFAULT"}
  with jax.default_matmul_precision("high"):
    assert _precisions(Network()) == {"HIGH"}
