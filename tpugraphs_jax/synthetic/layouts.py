"""The cost of the layouts of a program, and the two searches for layouts.

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

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.synthetic.program import (
  BYTES,
  BYTES_PER_NS,
  FLOPS_PER_NS,
  Op,
  padded_elements,
  ProgramBuilder,
  REGISTER_ELEMENTS,
  REGISTER_OPS_PER_NS,
  vector_cost,
)

SEARCH_RUNS = 20  # independent runs per file, each starting with the default twice
_COPY_RATE = 0.1  # children that equal their parent
_OPERAND_RATE = 0.45  # input and kernel orders off their default
_CONFIGURABLE_RESHAPES = 0.92
_DESCENTS = 8
_UNSEEN_GAIN = 1e-3  # share of the runtime below which the compiler does not choose
CONFIGURABLE = ("convolution", "dot", "reshape")
_ANY_ORDER = frozenset(
  "parameter constant broadcast iota rng tuple get-tuple-element gather call all-reduce".split()
)
_READS_ANY_ORDER = frozenset("reduce tuple gather all-reduce broadcast call".split())


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


def _minor_pair(program: ProgramBuilder, node: int) -> tuple[int, int]:
  """The two dimensions whose order is chosen: (default minor, default second)."""
  op = program.ops[node]
  if op.convolution:
    return op.convolution[13], op.convolution[12]
  if op.opcode == "reshape":
    return len(op.dims) - 1, 0
  return len(op.dims) - 1, len(op.dims) - 2


def layout_cost(program: ProgramBuilder, node_group: dict[int, int], *, steps: int) -> LayoutCost:
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
    if not _has_order(op):
      continue
    for bit in (0, 1):
      order = bit ^ flipped[node]
      orders[bit, group[node]] += round(_node_ns(program, node, owner[node], order) * steps)
    if op.opcode in _READS_ANY_ORDER:
      continue
    for used in program.operands[node]:
      if not _has_order(program.ops[used]):
        continue
      table = same if flipped[node] ^ flipped[used] ^ _turns(program, node) else differ
      pair = tuple(sorted((group[node], group[used])))
      table[pair] += round(_copy_ns(program, used, owner[used]) * steps)
  # Of two bits a and b, a + b - 2ab is 1 where they differ; where they agree, 1 minus that is 1.
  weight = np.triu(differ - same, 1)
  linear = orders[1] - orders[0] + weight.sum(0) + weight.sum(1)
  base = orders[0].sum() + same.sum()
  return LayoutCost(base, linear[:-1], pairs=-2 * weight[:-1, :-1])


def _owners(program: ProgramBuilder) -> tuple[list[int], list[int]]:
  """Per instruction the node whose order it takes over (or -1), and if turned round."""
  owner: list[int] = []
  flipped: list[int] = []
  for node, op in enumerate(program.ops):
    first = next((used for used in program.operands[node] if _has_order(program.ops[used])), None)
    of_node, is_flipped = -1, 0
    if op.opcode in CONFIGURABLE:
      of_node = node
    elif first is not None and _has_order(op) and op.opcode not in _READS_ANY_ORDER:
      of_node, is_flipped = owner[first], flipped[first] ^ _turns(program, node)
    owner.append(of_node)
    flipped.append(is_flipped)
  return owner, flipped


def _has_order(op: Op) -> bool:
  """Whether the output of an instruction has an order that costs time."""
  return len(op.dims) > 1 and op.opcode not in _ANY_ORDER


def _turns(program: ProgramBuilder, node: int) -> int:
  """1 for a transpose that moves the last dimension, else 0."""
  op = program.ops[node]
  return int(op.opcode == "transpose" and op.dimensions[-1] != len(op.dims) - 1)


def _node_ns(program: ProgramBuilder, node: int, owner: int, order: int) -> float:
  """Roofline time of one instruction whose output has the given order."""
  op = program.ops[node]
  elements = _elements(program, node, owner, order)
  matrix = 2 * elements * program.contraction.get(node, 0) / FLOPS_PER_NS
  vector = elements * vector_cost(op.opcode) / REGISTER_ELEMENTS / REGISTER_OPS_PER_NS
  return max(matrix + vector, 2 * elements * BYTES[op.dtype] / BYTES_PER_NS)


def _copy_ns(program: ProgramBuilder, node: int, owner: int) -> float:
  """Reading a tensor in one order and writing it in the other."""
  elements = sum(_elements(program, node, owner, order) for order in (0, 1))
  return elements * BYTES[program.ops[node].dtype] / BYTES_PER_NS


def _elements(program: ProgramBuilder, node: int, owner: int, order: int) -> int:
  dims = program.dims(node)
  same_rank = owner >= 0 and len(program.dims(owner)) == len(dims)
  pair = _minor_pair(program, owner if same_rank else node)
  minor, second = pair if order == 0 else pair[::-1]
  return padded_elements(dims, minor, second)


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


def find_groups(program: ProgramBuilder, rng: np.random.Generator) -> Groups:
  """Groups the configurable instructions by opcode, shapes and role."""
  keys: dict[tuple, int] = {}
  nodes: list[int] = []
  node_group: list[int] = []
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
  options, config_node = inverse.reshape(rows.shape[:2]), np.array(nodes)
  group_of_node = np.array(node_group, np.int32)
  return Groups(config_node, group_of_node, distinct, options, has_kernel, has_open)


def _option_rows(program: ProgramBuilder, node: int) -> list[tuple[int, ...]]:
  """The ten rows of 18 integers of one node, in the order of `Groups.options`."""
  op, left = program.ops[node], len(program.dims(program.operands[node][0]))
  if op.opcode == "reshape":
    orders = [_permutations(len(op.dims)), _permutations(left)]
    both = [columns.layout_row(pair) for pair in zip(*orders)]
    return [both[0]] * 4 + [both[1]] * 4 + both
  right = len(program.dims(program.operands[node][1]))
  pairs: list[tuple[int, ...]] = [(left - 1, left - 2), (right - 1, right - 2)]
  if op.convolution:
    pairs = [op.convolution[1::-1], op.convolution[7:5:-1]]
  output = _minor_pair(program, node)
  orders = [(pair, pair[::-1]) for pair in (output, *pairs)]
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
  groups: Groups, start: np.ndarray, configs: int, rng: np.random.Generator
) -> np.ndarray:
  """Uniform options `[configs, groups]` uint8; 40 of them the default if there are >= 80."""
  options = _unique_options(groups, start, configs, rng)
  if configs >= 4 * SEARCH_RUNS:
    blocks = np.linspace(0, configs, SEARCH_RUNS, endpoint=False).astype(int)
    options[np.concatenate([blocks, blocks + 1])] = default_options(groups, start)
  return options


def _unique_options(
  groups: Groups, start: np.ndarray, configs: int, rng: np.random.Generator
) -> np.ndarray:
  """Distinct draws while there are enough; a tiny space repeats itself."""
  options = np.zeros((0, len(groups)), np.uint8)
  for _ in range(4):
    choices = np.where(groups.has_kernel, 8, 2) + groups.has_open
    sample = (rng.random((configs, len(groups))) * choices).astype(np.uint8)
    sample[:, ~groups.has_kernel] *= 4
    sample = np.where(sample == 8, 8 + start, sample).astype(np.uint8)
    options = np.unique(np.concatenate([options, sample]), axis=0)
    if len(options) >= configs:
      return rng.permutation(options)[:configs]
  return rng.permutation(np.concatenate([options, sample]))[:configs]


def default_search(
  groups: Groups, cost: LayoutCost, start: np.ndarray, configs: int, rng: np.random.Generator
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
    runs[:, begin : begin + 8] = children[:, : length - begin]
    pool = np.concatenate([elite, children], axis=1)
    pool_ns = np.concatenate([elite_ns, cost(output_bits(children))], axis=1)
    keep = np.argsort(pool_ns, axis=1, kind="stable")[:, :8]
    elite = np.take_along_axis(pool, keep[..., None], axis=1)
    elite_ns = np.take_along_axis(pool_ns, keep, axis=1)
  return runs.reshape(-1, len(groups))[:configs]


def _children(groups: Groups, elite: np.ndarray, flip_rate: float, rng) -> np.ndarray:
  """One child per member: mutated output orders, fresh input and kernel orders."""
  chosen = rng.integers(0, elite.shape[1], elite.shape[:2])
  parent = np.take_along_axis(elite, chosen[..., None], axis=1)
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
