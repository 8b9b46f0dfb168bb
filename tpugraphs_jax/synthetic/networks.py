"""Whole programs for the layout collections: convolutional networks and text encoders.

`ImageProgram` (collection source `xla`) is a convolutional network, its body a computation of its
own; `TextProgram` (`nlp`) is a BERT-like encoder. Training programs add the two gradients of every
product and Adam. Both fill up with optimizer and mask arithmetic to the number of nodes asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from tpugraphs_jax.synthetic.program import ProgramBuilder

# Convolution dimension numbers in the order of their columns: activations are [batch, height,
# width, features], kernels [height, width, input, output].
_FORWARD = (0, 3, 1, 2, 0, 0, 2, 3, 0, 1, 0, 0, 0, 3)
# The gradient of a kernel sums over the batch.
_KERNEL_GRADIENT = (3, 0, 1, 2, 0, 0, 0, 3, 1, 2, 0, 0, 2, 3)
_CHANNELS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ADAM_NODES = 15
_MASK_OPCODES = (
  ("f32", ("multiply", "multiply", "add", "add", "subtract", "maximum", "sqrt")),
  ("u32", ("shift-left", "or", "and", "shift-right-logical", "add")),
)


@dataclasses.dataclass(frozen=True)
class _Window:
  """The window of a convolution."""

  kernel: int = 0  # 0 for a matrix product
  stride: int = 1
  base: int = 1  # dilation of the input


@dataclasses.dataclass(frozen=True)
class _Product:
  """A matrix product or convolution, recorded for its two gradients."""

  left: int
  right: int
  output: int
  activated: int  # the result that later instructions read
  role: str
  window: _Window = _Window()


@dataclasses.dataclass(frozen=True)
class ImageProgram:
  """A convolutional network in two computations.

  Attributes:
    nodes: of the finished graph, exactly.
    blocks: convolution layers.
    training: with gradients and optimizer.
    unused: shape of a parameter that nothing reads, an isolated node.
  """

  nodes: int
  blocks: int
  training: bool
  unused: tuple[int, int] = (1000, 256)

  def build(self, rng: np.random.Generator) -> ProgramBuilder:
    """Draws shapes and wiring.

    Raises:
      ValueError: the layers do not fit into the nodes.
    """
    program = ProgramBuilder()
    # Batches that fill the lanes badly, so that layers differ in the order they prefer.
    batch = int(rng.choice((32, 48, 64, 80, 96, 160, 192)))
    size = int(rng.choice((8, 12, 14, 16, 24, 28)))
    channels = int(rng.choice(_CHANNELS[:8]))
    program.add("parameter", self.unused)
    x = program.add("parameter", (batch, size, size, channels), parameter_number=1)
    tape = []
    for block in range(self.blocks):
      kernel = int(rng.choice((1, 3, 5), p=(0.35, 0.55, 0.1)))
      stride = 2 if block % max(2, self.blocks // 3) == 1 and size >= 8 else 1
      if rng.random() < 0.6:
        channels = int(rng.choice(_CHANNELS))
      tape.append(_convolution_block(program, x, channels, _Window(kernel, stride)))
      x, size = tape[-1].activated, program.dims(tape[-1].activated)[1]
    logits = _dense_head(program, x, int(rng.choice((10, 100, 256, 1000))), tape)
    weights = _gradients(program, tape, logits) if self.training else []
    _end_cluster(program, logits, weights)
    _fill(program, rng, self.nodes, weights)
    return program


@dataclasses.dataclass(frozen=True)
class TextProgram:
  """A BERT-like encoder.

  Attributes:
    nodes: of the finished graph, exactly.
    layers: of the encoder.
    training: with gradients and optimizer.
    batch: sequences.
    sequence: tokens of a sequence.
    hidden: width.
    heads: of the attention.
  """

  nodes: int
  layers: int
  training: bool
  batch: int
  sequence: int
  hidden: int
  heads: int

  def build(self, rng: np.random.Generator) -> ProgramBuilder:
    """Draws the arithmetic that fills up.

    Raises:
      ValueError: the layers do not fit into the nodes.
    """
    program = ProgramBuilder()
    tape: list[_Product] = []
    dims = (self.batch, self.sequence, self.hidden)
    flat = (self.batch * self.sequence, self.hidden)
    ids = program.add("parameter", dims[:2], dtype="s32")
    table = program.add("parameter", (30522, self.hidden), parameter_number=1)
    x = program.add("gather", dims, table, ids)
    for shape in (flat, dims):
      x = program.add("reshape", shape, x, role="embedding")
      x = program.like("multiply", x, program.scalar(program.dims(x)))
    for _ in range(self.layers):
      x = _encoder_layer(program, x, self.heads, tape)
    x = program.like("tanh", _dot(program, x, self.hidden, "pooler", tape))
    weights = _gradients(program, tape, x) if self.training else []
    _fill(program, rng, self.nodes, weights)
    return program


def _convolution(
  program: ProgramBuilder,
  left: int,
  right: int,
  dims,
  *,
  window: _Window,
  contraction: int,
  role: str,
  numbers=_FORWARD,
) -> int:
  low = (window.kernel - 1) // 2
  high = low + 1 - max(window.stride, window.base)
  row = (window.kernel, window.stride, low, high, 1, window.base, 0)
  operation = {"window": (row, row), "convolution": numbers, "contraction": contraction}
  return program.add("convolution", dims, left, right, role=role, **operation)


def _convolution_block(program: ProgramBuilder, x: int, channels: int, window: _Window) -> _Product:
  """Convolution, normalisation, bias, rectifier and, where shapes agree, a residual sum."""
  batch, height, _, features = program.dims(x)
  height, kernel = math.ceil(height / window.stride), window.kernel
  dims = (batch, height, height, channels)
  weight = program.add("parameter", (kernel, kernel, features, channels))
  terms = kernel * kernel * features
  y = _convolution(program, x, weight, dims, window=window, contraction=terms, role="forward")
  scale = program.like("rsqrt", program.reduce(y, (0, 1, 2)))
  z = program.like("multiply", y, program.spread(scale, dims, (3,)))
  bias = program.add("parameter", (channels,))
  z = program.like("add", z, program.spread(bias, dims, (3,)))
  z = program.like("maximum", z, program.scalar(dims))
  if program.dims(x) == dims:
    z = program.like("add", z, x)
  return _Product(x, weight, y, z, "forward", window)


def _dense_head(program: ProgramBuilder, x: int, classes: int, tape: list) -> int:
  """Pooling to 4 x 4, the reshape to a matrix, two dense layers and a softmax."""
  batch, size, _, features = program.dims(x)
  if size > 4:
    pool = (math.ceil(size / 4), math.ceil(size / 4), 0, 0, 1, 1, 0)
    single = (1, 1, 0, 0, 1, 1, 0)
    size = 4
    x = program.add(
      "reduce-window", (batch, 4, 4, features), x, window=(single, pool, pool, single)
    )
  x = program.add("reshape", (batch, size * size * features), x, role="head")
  x = _dot(program, x, 256, "dense", tape)
  x = program.like("maximum", x, program.scalar(program.dims(x)))
  return _softmax(program, _dot(program, x, classes, "logits", tape))


def _dot(
  program: ProgramBuilder,
  x: int,
  features: int,
  role: str,
  tape: list,
  dims: tuple[int, ...] | None = None,
) -> int:
  """A dense layer on the last axes of `x`, with bias; `dims` if they are split up."""
  depth = program.dims(x)[-1]
  dims = (*program.dims(x)[:-1], features) if dims is None else dims
  weight = program.add("parameter", (depth, features))
  y = program.add("dot", dims, x, weight, contraction=depth, role=role)
  bias = program.add("parameter", dims[-1:])
  z = program.like("add", y, program.spread(bias, dims, (len(dims) - 1,)))
  tape.append(_Product(x, weight, y, z, role))
  return z


def _softmax(program: ProgramBuilder, x: int) -> int:
  dims, last = program.dims(x), (len(program.dims(x)) - 1,)
  others = tuple(range(len(dims) - 1))
  peak = program.spread(program.reduce(x, last, "maximum"), dims, others)
  x = program.like("exponential", program.like("subtract", x, peak))
  return program.like("divide", x, program.spread(program.reduce(x, last), dims, others))


def _encoder_layer(program: ProgramBuilder, x: int, heads: int, tape: list) -> int:
  """Self-attention and feed-forward block with their residual sums: 8 dots."""
  batch, sequence, hidden = program.dims(x)
  depth = hidden // heads
  split = (batch, heads, sequence, depth)
  for_heads = lambda role: _dot(program, x, hidden, role, tape, split)
  query, key, value = map(for_heads, ("query", "key", "value"))
  key = program.add("transpose", (batch, heads, depth, sequence), key, dimensions=(0, 1, 3, 2))
  square = (batch, heads, sequence, sequence)
  scores = program.add("dot", square, query, key, contraction=depth, role="scores")
  tape.append(_Product(query, key, scores, scores, "scores"))
  shares = _softmax(program, scores)
  context = program.add("dot", split, shares, value, contraction=sequence, role="context")
  tape.append(_Product(shares, value, context, context, "context"))
  dims = (batch, sequence, heads, depth)
  joined = program.add("transpose", dims, context, dimensions=(0, 2, 1, 3))
  joined = program.add("bitcast", program.dims(x), joined)
  x = _residual_norm(program, x, _dot(program, joined, hidden, "output", tape))
  inner = _dot(program, x, 4 * hidden, "inner", tape)
  inner = program.like("multiply", inner, program.like("tanh", inner))
  return _residual_norm(program, x, _dot(program, inner, hidden, "outer", tape))


def _residual_norm(program: ProgramBuilder, x: int, y: int) -> int:
  dims = program.dims(x)
  y = program.like("add", y, x)
  scale = program.like("rsqrt", program.reduce(y, (2,)))
  return program.like("multiply", y, program.spread(scale, dims, (0, 1)))


def _gradients(program: ProgramBuilder, tape: list[_Product], loss: int) -> list[tuple[int, int]]:
  """Both gradients of every product, last first; returns (weight, gradient) pairs.

  The gradient that arrives at an output is the newest one of its shape.
  """
  newest, weights = {program.dims(loss): loss}, []
  for product in reversed(tape):
    dims = program.dims(product.activated)
    active = program.like("compare", product.activated, product.output, dtype="pred")
    active = program.like("convert", active, dtype="f32")
    incoming = program.like("multiply", newest.get(dims, product.activated), active)
    left, right = _product_gradients(program, product, incoming)
    left_dims = program.dims(product.left)
    if left_dims in newest:
      left = program.like("add", left, newest[left_dims])
    newest[left_dims] = left
    if program.ops[product.right].opcode == "parameter":
      weights.append((product.right, right))
    else:
      newest[program.dims(product.right)] = right
  return weights


def _product_gradients(
  program: ProgramBuilder, product: _Product, incoming: int
) -> tuple[int, int]:
  """The products that give the gradients of the left and of the right operand."""
  left, right = program.dims(product.left), program.dims(product.right)
  out, role = program.dims(incoming), product.role
  kernel, stride = product.window.kernel, product.window.stride
  if kernel:
    turned = program.like("reverse", product.right, dimensions=(0, 1))
    window, terms = _Window(kernel, base=stride), kernel * kernel * out[-1]
    convolve = functools.partial(_convolution, program)
    into = convolve(incoming, turned, left, window=window, contraction=terms, role="input gradient")
    convolve = functools.partial(convolve, role="kernel gradient", numbers=_KERNEL_GRADIENT)
    window, terms = product.window, math.prod(out[:-1])
    return into, convolve(product.left, incoming, right, window=window, contraction=terms)
  dims = (*right[:-2], right[-1], right[-2])
  order = (*range(len(right) - 2), len(right) - 1, len(right) - 2)
  turned = program.add("transpose", dims, product.right, dimensions=order)
  shared = math.prod(left) // left[-1]  # rows summed over in the right gradient
  if len(right) == 4:
    shared = left[-2]
  return (
    program.add("dot", left, incoming, turned, contraction=out[-1], role=f"{role} left"),
    program.add("dot", right, product.left, incoming, contraction=shared, role=f"{role} right"),
  )


def _end_cluster(program: ProgramBuilder, loss: int, weights: list[tuple[int, int]]) -> None:
  """Ends the network's computation and calls it from the entry computation.

  Replaces the entries of `weights` by the parameters and results that the entry
  computation sees.
  """
  outputs = [loss, *(gradient for _, gradient in weights)]
  program.add("tuple", (), *outputs, dtype="tuple", tuple_size=len(outputs))
  root = program.end_computation(split=True)
  call = program.add("call", (), root, dtype="tuple", tuple_size=len(outputs))
  for index, (weight, _) in enumerate(weights):
    dims = program.dims(weight)
    weights[index] = (program.add("parameter", dims), program.add("get-tuple-element", dims, call))


def _adam(program: ProgramBuilder, weight: int, gradient: int) -> int:
  """One optimizer step, `_ADAM_NODES` nodes."""
  dims = program.dims(weight)
  mean, square = program.add("parameter", dims), program.add("parameter", dims)
  decay, rate = program.scalar(dims), program.scalar(dims)
  mean = program.like("add", gradient, program.like("multiply", mean, decay))
  power = program.like("multiply", gradient, gradient)
  square = program.like("add", power, program.like("multiply", square, decay))
  step = program.like("divide", mean, program.like("sqrt", square))
  return program.like("subtract", weight, program.like("multiply", step, rate))


def _fill(program: ProgramBuilder, rng: np.random.Generator, nodes: int, weights) -> None:
  """Adds optimizer steps, then masks, then the root, up to `nodes` nodes."""
  if len(program) >= nodes:
    raise ValueError(
      f"the program has {len(program)} nodes before its root, "
      f"expected fewer than {nodes}; ask for fewer layers"
    )
  results = []
  for weight, gradient in weights:
    if len(program) + _ADAM_NODES < nodes:
      results.append(_adam(program, weight, gradient))
  while nodes - len(program) > 1:
    length = min(int(rng.integers(8, 24)), nodes - len(program) - 1)
    results.append(_mask(program, rng, length))
  results = results or [len(program.ops) - 1]
  program.add("tuple", (), *results, dtype="tuple", tuple_size=len(results))
  program.end_computation()


def _mask(program: ProgramBuilder, rng: np.random.Generator, length: int) -> int:
  """`length` nodes of arithmetic as dropout masks have it; of length 1 an isolated node."""
  dims = (int(rng.choice((8, 16, 64))), int(rng.choice((64, 128, 256))))
  dtype, opcodes = _MASK_OPCODES[int(rng.random() < 0.3)]
  x = y = program.add("parameter", dims, dtype=dtype)
  for opcode in rng.choice(opcodes, size=length - 1):
    x, y = program.like(str(opcode), x, y), x
  return x
