"""Whole programs for the layout collections, the cost of their layouts, and the two searches.

`ImageProgram` (collection source `xla`) is a convolutional network, its body a computation of its
own; `TextProgram` (`nlp`) is a BERT-like encoder. Training programs add the two gradients of every
product and Adam. Both fill up with optimizer and mask arithmetic to the number of nodes asked for.

Configurable instructions that do the same on the same shapes form a group and are decided
together. A choice is one of a group's rows: for a convolution or dot two orders each of output,
input and kernel (and for some dots a row that leaves input and kernel open), for a reshape two
permutations. Only the output's order costs time.

Everything elementwise takes over the order of its first operand (a transpose that moves the last
dimension turns it round), parameters and broadcasts come in whatever order is wanted, and
reductions read any order. So each tensor has the order of one configurable node, its owner, or
the default order. The time is the sum of

* per tensor: the larger of arithmetic and memory time, both times the padding of its two minor
  dimensions to 8 x 128;
* per operand whose order differs from its consumer's: a copy, the padded tensor read once and
  written once.

As each node has two orders, that is a quadratic function of the groups' bits. All costs are
whole nanoseconds, so sums are exact whatever their order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.synthetic import program as machine
from tpugraphs_jax.synthetic.program import BYTES, Program

# Convolution dimension numbers in the order of their columns: activations are [batch, height,
# width, features], kernels [height, width, input, output].
_FORWARD = (0, 3, 1, 2, 0, 0, 2, 3, 0, 1, 0, 0, 0, 3)
# The gradient of a kernel sums over the batch.
_KERNEL_GRADIENT = (3, 0, 1, 2, 0, 0, 0, 3, 1, 2, 0, 0, 2, 3)
_CHANNELS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ADAM_NODES = 15
_MASK_OPCODES = (
    ("f32", ("multiply", "multiply", "add", "add", "subtract", "maximum", "sqrt")),
    ("u32", ("shift-left", "or", "and", "shift-right-logical", "add")))


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

  def build(self, rng: np.random.Generator) -> Program:
    """Draws shapes and wiring.

    Raises:
      ValueError: the layers do not fit into the nodes.
    """
    program = Program()
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
    reshapes: before the layers.
    training: with gradients and optimizer.
    batch: sequences.
    sequence: tokens of a sequence.
    hidden: width.
    heads: of the attention.
  """

  nodes: int
  layers: int
  reshapes: int
  training: bool
  batch: int
  sequence: int
  hidden: int
  heads: int

  def build(self, rng: np.random.Generator) -> Program:
    """Draws the arithmetic that fills up.

    Raises:
      ValueError: the layers do not fit into the nodes.
    """
    program, tape = Program(), []
    dims = (self.batch, self.sequence, self.hidden)
    flat = (self.batch * self.sequence, self.hidden)
    ids = program.add("parameter", dims[:2], dtype="s32")
    table = program.add("parameter", (30522, self.hidden), parameter_number=1)
    x = program.add("gather", dims, table, ids)
    for index in range(self.reshapes):
      x = program.add("reshape", flat if index % 2 == 0 else dims, x, role="embedding")
      x = program.like("multiply", x, program.scalar(program.dims(x)))
    if self.reshapes % 2:
      x = program.add("bitcast", dims, x)
    for _ in range(self.layers):
      x = _encoder_layer(program, x, self.heads, tape)
    x = program.like("tanh", _dot(program, x, self.hidden, "pooler", tape))
    weights = _gradients(program, tape, x) if self.training else []
    _fill(program, rng, self.nodes, weights)
    return program


def _convolution(program: Program, left: int, right: int, dims, *, window: _Window,
                 contraction: int, role: str, numbers=_FORWARD) -> int:
  low = (window.kernel - 1) // 2
  high = low + 1 - max(window.stride, window.base)
  row = (window.kernel, window.stride, low, high, 1, window.base, 0)
  return program.add(
      "convolution", dims, left, right, window=(row, row), convolution=numbers,
      contraction=contraction, role=role)


def _convolution_block(program: Program, x: int, channels: int, window: _Window) -> _Product:
  """Convolution, normalisation, bias, rectifier and, where shapes agree, a residual sum."""
  batch, height, _, features = program.dims(x)
  height, kernel = math.ceil(height / window.stride), window.kernel
  dims = (batch, height, height, channels)
  weight = program.add("parameter", (kernel, kernel, features, channels))
  y = _convolution(program, x, weight, dims, window=window,
                   contraction=kernel * kernel * features, role="forward")
  scale = program.like("rsqrt", program.reduce(y, (0, 1, 2)))
  z = program.like("multiply", y, program.spread(scale, dims, (3,)))
  bias = program.add("parameter", (channels,))
  z = program.like("add", z, program.spread(bias, dims, (3,)))
  z = program.like("maximum", z, program.scalar(dims))
  if program.dims(x) == dims:
    z = program.like("add", z, x)
  return _Product(x, weight, y, z, "forward", window)


def _dense_head(program: Program, x: int, classes: int, tape: list) -> int:
  """Pooling to 4 x 4, the reshape to a matrix, two dense layers and a softmax."""
  batch, size, _, features = program.dims(x)
  if size > 4:
    pool = (math.ceil(size / 4), math.ceil(size / 4), 0, 0, 1, 1, 0)
    one = (1, 1, 0, 0, 1, 1, 0)
    size = 4
    x = program.add("reduce-window", (batch, 4, 4, features), x, window=(one, pool, pool, one))
  x = program.add("reshape", (batch, size * size * features), x, role="head")
  x = _dot(program, x, 256, "dense", tape)
  x = program.like("maximum", x, program.scalar(program.dims(x)))
  return _softmax(program, _dot(program, x, classes, "logits", tape))


def _dot(program: Program, x: int, features: int, role: str, tape: list,
         dims: tuple[int, ...] | None = None) -> int:
  """A dense layer on the last axes of `x`, with bias; `dims` if they are split up."""
  depth = program.dims(x)[-1]
  dims = (*program.dims(x)[:-1], features) if dims is None else dims
  weight = program.add("parameter", (depth, features))
  y = program.add("dot", dims, x, weight, contraction=depth, role=role)
  bias = program.add("parameter", dims[-1:])
  z = program.like("add", y, program.spread(bias, dims, (len(dims) - 1,)))
  tape.append(_Product(x, weight, y, z, role))
  return z


def _softmax(program: Program, x: int) -> int:
  dims, last = program.dims(x), (len(program.dims(x)) - 1,)
  kept = tuple(range(len(dims) - 1))
  peak = program.spread(program.reduce(x, last, "maximum"), dims, kept)
  x = program.like("exponential", program.like("subtract", x, peak))
  return program.like("divide", x, program.spread(program.reduce(x, last), dims, kept))


def _encoder_layer(program: Program, x: int, heads: int, tape: list) -> int:
  """Self-attention and feed-forward block with their residual sums: 8 dots."""
  batch, sequence, hidden = program.dims(x)
  depth = hidden // heads
  split = (batch, heads, sequence, depth)
  query, key, value = (
      _dot(program, x, hidden, role, tape, split) for role in ("query", "key", "value"))
  key = program.add("transpose", (batch, heads, depth, sequence), key, dimensions=(0, 1, 3, 2))
  scores = program.add("dot", (batch, heads, sequence, sequence), query, key,
                       contraction=depth, role="scores")
  tape.append(_Product(query, key, scores, scores, "scores"))
  shares = _softmax(program, scores)
  context = program.add("dot", split, shares, value, contraction=sequence, role="context")
  tape.append(_Product(shares, value, context, context, "context"))
  joined = program.add("bitcast", program.dims(x), program.add(
      "transpose", (batch, sequence, heads, depth), context, dimensions=(0, 2, 1, 3)))
  x = _residual_norm(program, x, _dot(program, joined, hidden, "output", tape))
  inner = _dot(program, x, 4 * hidden, "inner", tape)
  inner = program.like("multiply", inner, program.like("tanh", inner))
  return _residual_norm(program, x, _dot(program, inner, hidden, "outer", tape))


def _residual_norm(program: Program, x: int, y: int) -> int:
  dims = program.dims(x)
  y = program.like("add", y, x)
  scale = program.like("rsqrt", program.reduce(y, (2,)))
  return program.like("multiply", y, program.spread(scale, dims, (0, 1)))


def _gradients(program: Program, tape: list[_Product], loss: int) -> list[tuple[int, int]]:
  """Both gradients of every product, last first; returns (weight, gradient) pairs.

  The gradient that arrives at an output is the newest one of its shape.
  """
  newest, weights = {program.dims(loss): loss}, []
  for product in reversed(tape):
    dims = program.dims(product.activated)
    active = program.like("convert", program.like(
        "compare", product.activated, product.output, dtype="pred"), dtype="f32")
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


def _product_gradients(program: Program, product: _Product, incoming: int) -> tuple[int, int]:
  """The products that give the gradients of the left and of the right operand."""
  left, right = program.dims(product.left), program.dims(product.right)
  out, role = program.dims(incoming), product.role
  kernel, stride = product.window.kernel, product.window.stride
  if kernel:
    turned = program.like("reverse", product.right, dimensions=(0, 1))
    return (
        _convolution(program, incoming, turned, left, window=_Window(kernel, base=stride),
                     contraction=kernel * kernel * out[-1], role="input gradient"),
        _convolution(program, product.left, incoming, right, window=product.window,
                     contraction=math.prod(out[:-1]), role="kernel gradient",
                     numbers=_KERNEL_GRADIENT))
  turned = program.add(
      "transpose", (*right[:-2], right[-1], right[-2]), product.right,
      dimensions=(*range(len(right) - 2), len(right) - 1, len(right) - 2))
  shared = math.prod(left) // left[-1]  # rows summed over in the right gradient
  if len(right) == 4:
    shared = left[-2]
  return (
      program.add("dot", left, incoming, turned, contraction=out[-1], role=f"{role} left"),
      program.add("dot", right, product.left, incoming, contraction=shared,
                  role=f"{role} right"))


def _end_cluster(program: Program, loss: int, weights: list[tuple[int, int]]) -> None:
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


def _adam(program: Program, weight: int, gradient: int) -> int:
  """One optimizer step, `_ADAM_NODES` nodes."""
  dims = program.dims(weight)
  mean, square = program.add("parameter", dims), program.add("parameter", dims)
  decay, rate = program.scalar(dims), program.scalar(dims)
  mean = program.like("add", gradient, program.like("multiply", mean, decay))
  power = program.like("multiply", gradient, gradient)
  square = program.like("add", power, program.like("multiply", square, decay))
  step = program.like("divide", mean, program.like("sqrt", square))
  return program.like("subtract", weight, program.like("multiply", step, rate))


def _fill(program: Program, rng: np.random.Generator, nodes: int, weights) -> None:
  """Adds optimizer steps, then masks, then the root, up to `nodes` nodes."""
  if len(program) >= nodes:
    raise ValueError(f"the program has {len(program)} nodes before its root, "
                     f"expected fewer than {nodes}; ask for fewer layers")
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


def _mask(program: Program, rng: np.random.Generator, length: int) -> int:
  """`length` nodes of arithmetic as dropout masks have it; of length 1 an isolated node."""
  dims = (int(rng.choice((8, 16, 64))), int(rng.choice((64, 128, 256))))
  dtype, opcodes = _MASK_OPCODES[int(rng.random() < 0.3)]
  x = y = program.add("parameter", dims, dtype=dtype)
  for opcode in rng.choice(opcodes, size=length - 1):
    x, y = program.like(str(opcode), x, y), x
  return x


SEARCH_RUNS = 20  # independent runs per file, each starting with the default twice
_COPY_RATE = 0.1  # children that equal their parent
_OPERAND_RATE = 0.45  # input and kernel orders off their default
_CONFIGURABLE_RESHAPES = 0.92
_DESCENTS = 8
_UNSEEN_GAIN = 1e-3  # share of the runtime below which the compiler does not choose
CONFIGURABLE = ("convolution", "dot", "reshape")
_ANY_ORDER = frozenset((
    "parameter", "constant", "broadcast", "iota", "rng", "tuple", "get-tuple-element",
    "gather", "call", "all-reduce"))
_READS_ANY_ORDER = frozenset(("reduce", "tuple", "gather", "all-reduce", "broadcast", "call"))


@dataclasses.dataclass(frozen=True)
class LayoutCost:
  """The time of a program as `base + linear . bits + bits . pairs . bits`, nanoseconds."""

  base: float
  linear: np.ndarray  # [groups] float64
  pairs: np.ndarray  # [groups, groups] float64, upper triangle

  def __call__(self, bits: np.ndarray) -> np.ndarray:
    """Noise-free runtimes `[...]` float64 ns of bits `[..., groups]`."""
    bits = bits.astype(np.float64)
    return self.base + bits @ self.linear + ((bits @ self.pairs) * bits).sum(-1)

  def flip_ns(self, bits: np.ndarray) -> np.ndarray:
    """The change of the runtime by flipping each of `bits [groups]`, `[groups]` float64 ns."""
    slope = self.linear + (self.pairs + self.pairs.T) @ bits
    return np.where(bits, -slope, slope)


def _minor_pair(program: Program, node: int) -> tuple[int, int]:
  """The two dimensions whose order is chosen: (default minor, default second)."""
  op = program.ops[node]
  if op.convolution:
    return op.convolution[13], op.convolution[12]
  if op.opcode == "reshape":
    return len(op.dims) - 1, 0
  return len(op.dims) - 1, len(op.dims) - 2


def layout_cost(program: Program, node_group: dict[int, int], *, steps: int) -> LayoutCost:
  """The cost function of a program.

  Args:
    program: the program.
    node_group: group number of each configurable instruction.
    steps: how often the program runs its body; scales every cost.
  """
  groups = max(node_group.values(), default=-1) + 1
  # The last row and column stand for the default order, a bit that is always 0.
  same, differ = np.zeros((2, groups + 1, groups + 1))
  orders = np.zeros((2, groups + 1))
  owner, flipped = _owners(program)
  group = [node_group.get(o, groups) for o in owner]
  for node, op in enumerate(program.ops):
    if len(op.dims) < 2 or op.opcode in _ANY_ORDER:
      continue
    for bit in (0, 1):
      order = bit ^ flipped[node]
      orders[bit, group[node]] += round(_node_ns(program, node, owner[node], order) * steps)
    if op.opcode in _READS_ANY_ORDER:
      continue
    for used in program.operands[node]:
      if len(program.dims(used)) < 2 or program.ops[used].opcode in _ANY_ORDER:
        continue
      table = same if flipped[node] ^ flipped[used] ^ _turns(program, node) else differ
      pair = tuple(sorted((group[node], group[used])))
      table[pair] += round(_copy_ns(program, used, owner[used]) * steps)
  # A copy where bits differ costs (a + b - 2ab), one where they agree the rest to 1.
  weight = np.triu(differ - same, 1)
  linear = orders[1] - orders[0] + weight.sum(0) + weight.sum(1)
  return LayoutCost(base=orders[0].sum() + same.sum(), linear=linear[:-1],
                    pairs=-2 * weight[:-1, :-1])


def _owners(program: Program) -> tuple[list[int], list[int]]:
  """Per instruction the node whose order it takes over (or -1), and if turned round."""
  owner, flipped = [], []
  for node, op in enumerate(program.ops):
    first = next((v for v in program.operands[node] if len(program.dims(v)) > 1 and
                  program.ops[v].opcode not in _ANY_ORDER), None)
    if op.opcode in CONFIGURABLE:
      owner.append(node)
      flipped.append(0)
    elif first is None or len(op.dims) < 2 or op.opcode in _READS_ANY_ORDER | _ANY_ORDER:
      owner.append(-1)
      flipped.append(0)
    else:
      owner.append(owner[first])
      flipped.append(flipped[first] ^ _turns(program, node))
  return owner, flipped


def _turns(program: Program, node: int) -> int:
  """1 for a transpose that moves the last dimension, else 0."""
  op = program.ops[node]
  return int(op.opcode == "transpose" and op.dimensions[-1] != len(op.dims) - 1)


def _node_ns(program: Program, node: int, owner: int, order: int) -> float:
  """Roofline time of one instruction whose output has the given order."""
  op = program.ops[node]
  elements = _elements(program, node, owner, order)
  matrix = 2 * elements * program.contraction.get(node, 0) / machine.FLOPS_PER_NS
  vector = (elements * machine.vector_cost(op.opcode) / machine.REGISTER_ELEMENTS /
            machine.REGISTER_OPS_PER_NS)
  return max(matrix + vector, 2 * elements * BYTES[op.dtype] / machine.BYTES_PER_NS)


def _copy_ns(program: Program, node: int, owner: int) -> float:
  """Reading a tensor in one order and writing it in the other."""
  elements = sum(_elements(program, node, owner, order) for order in (0, 1))
  return elements * BYTES[program.ops[node].dtype] / machine.BYTES_PER_NS


def _elements(program: Program, node: int, owner: int, order: int) -> int:
  dims = program.dims(node)
  same_rank = owner >= 0 and len(program.dims(owner)) == len(dims)
  pair = _minor_pair(program, owner if same_rank else node)
  minor, second = pair if order == 0 else pair[::-1]
  return machine.padded_elements(dims, minor, second)


@dataclasses.dataclass(frozen=True)
class Groups:
  """The choices of a program: `K` nodes in `G` groups with `R` rows in all."""

  config_node: np.ndarray  # [K] int64 instruction numbers
  node_group: np.ndarray  # [K] int32
  rows: np.ndarray  # [R, 18] int8
  # [G, 10] row numbers. Option 4 * output + 2 * input + kernel, each order 0 or 1;
  # 8 + output leaves input and kernel open.
  options: np.ndarray
  has_kernel: np.ndarray  # [G] bool, False for reshapes: options 0 and 4 only
  has_open: np.ndarray  # [G] bool, the default is an open option

  def __len__(self) -> int:
    return len(self.options)

  def by_node(self) -> dict[int, int]:
    return dict(zip(self.config_node.tolist(), self.node_group.tolist()))


def find_groups(program: Program, rng: np.random.Generator) -> Groups:
  """Groups the configurable instructions by opcode, shapes and role."""
  keys, nodes, node_group = {}, [], []
  for node, op in enumerate(program.ops):
    if op.opcode not in CONFIGURABLE:
      continue
    if op.opcode == "reshape" and nodes and rng.random() > _CONFIGURABLE_RESHAPES:
      continue
    operands = tuple(program.dims(v) for v in program.operands[node])
    key = (op, operands, program.role[node])
    nodes.append(node)
    node_group.append(keys.setdefault(key, len(keys)))
  first = [node_group.index(g) for g in range(len(keys))]
  has_kernel = np.array([program.ops[nodes[i]].opcode != "reshape" for i in first])
  is_dot = np.array([program.ops[nodes[i]].opcode == "dot" for i in first])
  has_open = is_dot & (rng.random(len(keys)) < 0.5)
  rows = np.array([_option_rows(program, nodes[i]) for i in first], np.int8)
  distinct, inverse = np.unique(rows.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)
  return Groups(
      config_node=np.array(nodes), node_group=np.array(node_group, np.int32), rows=distinct,
      options=inverse.reshape(rows.shape[:2]), has_kernel=has_kernel, has_open=has_open)


def _option_rows(program: Program, node: int) -> list[np.ndarray]:
  """The ten rows of 18 integers of one node, in the order of `Groups.options`."""
  op, left = program.ops[node], len(program.dims(program.operands[node][0]))
  if op.opcode == "reshape":
    orders = [_permutations(len(op.dims)), _permutations(left)]
    both = [columns.layout_row(pair) for pair in zip(*orders)]
    return [both[0]] * 4 + [both[1]] * 4 + both
  right = len(program.dims(program.operands[node][1]))
  source, kernel = (left - 1, left - 2), (right - 1, right - 2)
  if op.convolution:
    source, kernel = op.convolution[1::-1], op.convolution[7:5:-1]
  output = _minor_pair(program, node)
  orders = [(pair, pair[::-1]) for pair in (output, source, kernel)]
  closed = [columns.layout_row(choice) for choice in itertools.product(*orders)]
  return closed + [columns.layout_row([order]) for order in (output, output[::-1])]


def _permutations(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  descending = tuple(range(rank))[::-1]
  return descending, (0, *descending[:-1])


def default_bits(cost: LayoutCost, rng: np.random.Generator) -> np.ndarray:
  """The compiler's own choice `[groups]` bool: the best of some descents, small gains missed."""
  starts = rng.random((_DESCENTS, len(cost.linear))) < 0.5
  best = min((_descend(cost, bits) for bits in starts), key=cost)
  small = np.abs(cost.flip_ns(best)) < _UNSEEN_GAIN * cost(best)
  return best ^ (small & (rng.random(len(best)) < 0.5))


def _descend(cost: LayoutCost, bits: np.ndarray) -> np.ndarray:
  """Flips the most rewarding bit until none is left."""
  bits = bits.copy()
  while (change := cost.flip_ns(bits)).min(initial=0) < 0:
    bits[change.argmin()] ^= True
  return bits


def random_search(
    groups: Groups, start: np.ndarray, configs: int, rng: np.random.Generator) -> np.ndarray:
  """Uniform options `[configs, groups]` uint8; 40 of them the default if there are >= 80."""
  options = _unique_options(groups, start, configs, rng)
  if configs >= 4 * SEARCH_RUNS:
    blocks = np.linspace(0, configs, SEARCH_RUNS, endpoint=False).astype(int)
    options[np.concatenate([blocks, blocks + 1])] = default_options(groups, start)
  return options


def _unique_options(
    groups: Groups, start: np.ndarray, configs: int, rng: np.random.Generator) -> np.ndarray:
  """Distinct draws while there are enough; a tiny space repeats itself."""
  options = np.zeros((0, len(groups)), np.uint8)
  for _ in range(4):
    choices = np.where(groups.has_kernel, 8, 2) + groups.has_open
    drawn = (rng.random((configs, len(groups))) * choices).astype(np.uint8)
    drawn[:, ~groups.has_kernel] *= 4
    drawn = np.where(drawn == 8, 8 + start, drawn).astype(np.uint8)
    options = np.unique(np.concatenate([options, drawn]), axis=0)
    if len(options) >= configs:
      return rng.permutation(options)[:configs]
  return rng.permutation(np.concatenate([options, drawn]))[:configs]


def default_search(
    groups: Groups, cost: LayoutCost, start: np.ndarray, configs: int,
    rng: np.random.Generator,
) -> np.ndarray:
  """Options `[configs, groups]` uint8 of 20 genetic runs from the default configuration."""
  default = default_options(groups, start)
  length = -(-configs // SEARCH_RUNS)
  runs = np.empty((SEARCH_RUNS, length, len(groups)), np.uint8)
  elite = np.tile(default, (SEARCH_RUNS, 8, 1))
  elite_ns = np.tile(cost(start), (SEARCH_RUNS, 8))
  flip_rate = rng.uniform(0.03, 0.10)
  for begin in range(0, length, 8):
    children = _children(groups, elite, flip_rate, rng)
    if begin == 0:
      children[:, :2] = default
    runs[:, begin:begin + 8] = children[:, :length - begin]
    pool = np.concatenate([elite, children], axis=1)
    pool_ns = np.concatenate([elite_ns, cost(output_bits(children))], axis=1)
    keep = np.argsort(pool_ns, axis=1, kind="stable")[:, :8]
    elite = np.take_along_axis(pool, keep[..., None], axis=1)
    elite_ns = np.take_along_axis(pool_ns, keep, axis=1)
  return runs.reshape(-1, len(groups))[:configs]


def _children(groups: Groups, elite: np.ndarray, flip_rate: float, rng) -> np.ndarray:
  """One child per member: mutated output orders, fresh input and kernel orders."""
  parent = np.take_along_axis(
      elite, rng.integers(0, elite.shape[1], elite.shape[:2])[..., None], axis=1)
  flips = rng.random(parent.shape) < flip_rate
  operands = rng.random((2, *parent.shape)) < _OPERAND_RATE
  child = 4 * (output_bits(parent) ^ flips)
  child = child + np.where(groups.has_kernel, 2 * operands[0] + operands[1], 0)
  copied = rng.random((*parent.shape[:2], 1)) < _COPY_RATE
  return np.where(copied, parent, child).astype(np.uint8)


def default_options(groups: Groups, start: np.ndarray) -> np.ndarray:
  """The default configuration, `[groups]` uint8."""
  return np.where(groups.has_open, 8 + start, 4 * start).astype(np.uint8)


def output_bits(options: np.ndarray) -> np.ndarray:
  """The output order, bool of the same shape, of each option."""
  return np.where(options < 8, options >= 4, options == 9)
