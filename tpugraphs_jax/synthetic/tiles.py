"""Fused kernels, their tile choices, and the runtime of a kernel as a function of its tile.

A kernel computes one output tensor with named axes. Its instructions keep track of the axes
they run over, so that the cost model can tell which of them a tile cuts. Four families:
pointwise (`map`), a normalisation that reduces an axis and uses the result at every element
(`normalize`), a reduction as the output (`reduce`), a matrix product or convolution with fused
producers (`product`). The expensive opcodes sit before or after the reduction or on one or the
other operand of the product: the same instructions, wired differently.

The output is computed tile by tile. An instruction is evaluated for each tile over the part of
its axes that the tile needs: a tiled axis as far as the tile goes, any other axis in full. Which
axes are tiled for an instruction is handed down from the root to the operands: below a reduction
the reduced axis is needed in full, and so is the summed axis of a product. So whatever feeds a
reduction or one operand of a product is computed anew for every tile along the axes it lacks,
and costs by its opcode.

    time = tiles * (start + cuts * (cut + spill) + max(vector + matrix, memory))

* vector: cost of the opcode x registers, over all tiles;
* matrix: multiply-adds of a product, whose summed axis the kernel tile cuts (elsewhere there is
  one cut);
* memory: parameters as often as tiles need them, and the output;
* spill: what does not fit on chip (parameters and output of two tiles, results with several
  users) is written out and read back at every start.

All sizes are in registers of 8 x 128 elements.
"""

from __future__ import annotations

import math

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.synthetic import program
from tpugraphs_jax.synthetic.program import BYTES, ProgramBuilder

_CHEAP = ("add", "multiply", "subtract", "maximum", "minimum", "negate")
_UNARY = ("negate", "exponential", "tanh", "log", "rsqrt", "sqrt")
_SLOW = ("exponential", "tanh", "log", "power", "divide")
_FAMILIES = ("map", "normalize", "reduce", "product")
_FAMILY_SHARES = (0.2, 0.3, 0.1, 0.4)
_REDUCED_SHARES = (0.2, 0.8)  # how often a reduction takes the second minor, the minor axis
_RANKS, _RANK_SHARES = (2, 3, 4), (0.5, 0.3, 0.2)
_TILES = 3  # regular tiles for each configuration wanted
_REDUCED_TILES = 8  # times as many for an output that will lose an axis
_DRAWS = 100  # of a shape
_DRAWN = (2, 6, 24)  # tiles drawn for each one wanted, more if too few fit on chip
_UNTILED_CONFIGS = 32
_COMPILER_ERROR = 0.1  # sd of the log of the compiler's own estimate
_TRANSFER_NS = program.REGISTER_BYTES / program.BYTES_PER_NS  # per register


class KernelBuilder:
  """A fused computation, built by axes instead of by dimensions.

  Attributes:
    program: of the computation, and of the entry computation that calls it.
    sizes: elements along each axis, major first.
    axes: the axes that each instruction of the computation runs over.
    output_axes: of the root; all axes unless a builder changes them.
    kernel_axes: of the kernel of a product, else empty.
    root: number of the last instruction of the computation, set by `finish`.
  """

  def __init__(self, sizes: dict[str, int], dtype: str = "f32"):
    self.program, self.sizes, self.dtype = ProgramBuilder(), sizes, dtype
    self.axes: dict[int, tuple[str, ...]] = {}
    self.parameters: list[int] = []
    self.output_axes: tuple[str, ...] = tuple(sizes)
    self.kernel_axes: tuple[str, ...] = ()
    self.root = -1

  @property
  def fused(self) -> range:
    """Numbers of the instructions of the computation, root last."""
    return range(self.root + 1)

  def add(self, opcode: str, axes: tuple[str, ...], *operands: int, **attributes) -> int:
    dims = tuple(self.sizes[a] for a in axes)
    attributes.setdefault("dtype", self.dtype)
    node = self.program.add(opcode, dims, *operands, **attributes)
    self.axes[node] = axes
    return node

  def parameter(self, axes: tuple[str, ...]) -> int:
    node = self.add("parameter", axes, parameter_number=len(self.parameters))
    self.parameters.append(node)
    return node

  def spread(self, node: int, axes: tuple[str, ...]) -> int:
    dimensions = tuple(axes.index(a) for a in self.axes[node])
    return self.add("broadcast", axes, node, dimensions=dimensions)

  def constant(self, axes: tuple[str, ...]) -> int:
    scalar = self.program.add("constant", dtype=self.dtype)
    self.axes[scalar] = ()
    return self.spread(scalar, axes)

  def reduce(self, node: int, axis: str) -> int:
    axes = self.axes[node]
    result = self.program.reduce(node, (axes.index(axis),))
    self.axes[result - 1] = ()
    self.axes[result] = tuple(a for a in axes if a != axis)
    return result

  def apply(self, opcode: str, x: int, rng: np.random.Generator, others=()) -> int:
    """An elementwise instruction; a binary one takes a new or an earlier operand."""
    axes = self.axes[x]
    if opcode in _UNARY:
      return self.add(opcode, axes, x)
    kind = rng.random()
    if others and kind < 0.45:
      operand = others[int(rng.integers(len(others)))]
    elif kind < 0.6 and len(axes) > 1:
      keep = sorted(rng.choice(len(axes), size=rng.integers(1, len(axes)), replace=False))
      operand = self.spread(self.parameter(tuple(axes[i] for i in keep)), axes)
    elif kind < 0.8:
      operand = self.constant(axes)
    else:
      operand = self.parameter(axes)
    return self.add(opcode, axes, x, operand)

  def chain(self, x: int, opcodes, rng: np.random.Generator) -> int:
    """Elementwise instructions one after the other, some reading earlier results again."""
    results = []
    for opcode in opcodes:
      results.append(x)
      x = self.apply(str(opcode), x, rng, results[:-1])
    return x

  def finish(self) -> KernelBuilder:
    """Ends the computation."""
    self.root = self.program.end_computation()
    return self

  def call(self) -> KernelBuilder:
    """Ends the computation and adds the entry computation that calls it."""
    self.finish()
    entry = [
      self.program.add("parameter", self.program.dims(p), parameter_number=i, dtype=self.dtype)
      for i, p in enumerate(self.parameters)
    ]
    self.program.like("fusion", self.root, *entry)
    self.program.end_computation()
    return self


def random_kernel(rng: np.random.Generator, *, nodes: int, configs: int = 1) -> KernelBuilder:
  """A kernel of about `nodes` nodes.

  Args:
    rng: decides family, shapes and wiring.
    nodes: how many are wanted; fewer than 6 give a copy of two nodes.
    configs: how many configurations the shape of the output is to allow.
  """
  dtype = "bf16" if rng.random() < 0.25 else "f32"
  if nodes < 6:
    kernel = KernelBuilder(_output_sizes(rng, configs), dtype)
    kernel.add("copy", kernel.output_axes, kernel.parameter(kernel.output_axes))
    return kernel.finish()
  family = str(rng.choice(_FAMILIES, p=_FAMILY_SHARES))
  # A reduction has one of the axes no longer in its output.
  wanted = configs * (_REDUCED_TILES if family == "reduce" else 1)
  kernel = KernelBuilder(_output_sizes(rng, wanted), dtype)
  build = {"map": _map, "normalize": _normalize, "reduce": _reduce, "product": _product}
  build[family](kernel, _opcodes(rng, nodes), rng)
  return kernel.call()


def _output_sizes(rng: np.random.Generator, configs: int) -> dict[str, int]:
  """Axis names, major first, with sizes; the last two are `m` and `n`.

  The first of some random shapes that has enough regular tiles, else the one with most.
  """
  shapes = []
  for _ in range(_DRAWS):
    major = {
      name: int(rng.choice((2, 4, 6, 8, 12, 16, 24, 32, 48, 64)))
      for name in "ab"[: int(rng.choice(_RANKS, p=_RANK_SHARES)) - 2]
    }
    minor = {
      "m": int(rng.choice((64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536))),
      "n": int(rng.choice((128, 256, 384, 512, 768, 1024, 1536, 2048, 3072))),
    }
    shapes.append(major | minor)
    if _regular_tiles(shapes[-1]) >= _TILES * configs:
      break
  return max(shapes, key=_regular_tiles)


def _regular_tiles(sizes: dict[str, int]) -> int:
  """How many tiles of whole registers divide an output evenly."""
  units = program.register_shape(len(sizes))
  extents = (math.ceil(size / unit) for size, unit in zip(sizes.values(), units))
  return math.prod(len(_divisors(extent)) for extent in extents)


def _divisors(extent: int) -> set[int]:
  return {d for d in range(1, extent + 1) if extent % d == 0}


def _opcodes(rng: np.random.Generator, nodes: int) -> tuple[list[str], list[str]]:
  """Opcodes before and after the reduction or product: the slow ones on one side.

  A binary instruction comes with two more nodes on average.
  """
  count = max(2, round((nodes - 5) / 2.3))
  slow = [str(o) for o in rng.choice(_SLOW, size=rng.integers(1, 4))]
  near = [str(o) for o in rng.choice(_CHEAP, size=min(int(rng.integers(1, 4)), count))]
  far = [str(o) for o in rng.choice(_CHEAP, size=max(0, count - len(near) - len(slow)))]
  if rng.random() < 0.5:
    return list(rng.permutation(near + slow)), far
  return near, list(rng.permutation(slow)) + far


def _map(kernel: KernelBuilder, opcodes, rng: np.random.Generator) -> None:
  kernel.chain(kernel.parameter(kernel.output_axes), opcodes[0] + opcodes[1], rng)


def _normalize(kernel: KernelBuilder, opcodes, rng: np.random.Generator) -> None:
  """The tile needs the reduced axis whole before it can start."""
  axes = kernel.output_axes
  x = kernel.parameter(axes)
  y = kernel.chain(x, opcodes[0], rng)
  total = kernel.reduce(y, str(rng.choice(axes[-2:], p=_REDUCED_SHARES)))
  x = kernel.add("multiply", axes, x, kernel.spread(total, axes))
  kernel.chain(x, opcodes[1], rng)


def _reduce(kernel: KernelBuilder, opcodes, rng: np.random.Generator) -> None:
  """The output lacks one of the input's axes."""
  axes = tuple(kernel.sizes)
  reduced = str(rng.choice(axes[-2:], p=_REDUCED_SHARES)) if len(axes) > 2 else "m"
  x = kernel.chain(kernel.parameter(axes), opcodes[0], rng)
  x = kernel.reduce(x, reduced)
  kernel.output_axes = kernel.axes[x]
  kernel.chain(x, opcodes[1], rng)


def _product(kernel: KernelBuilder, opcodes, rng: np.random.Generator) -> None:
  """A matrix product; producers on one operand are repeated for the other's tiles."""
  kernel.sizes["k"] = int(rng.choice((128, 256, 512, 768, 1024, 2048)))
  kernel.kernel_axes = ("k", "n")
  left = kernel.parameter((*kernel.output_axes[:-1], "k"))
  right = kernel.parameter(kernel.kernel_axes)
  if rng.random() < 0.5:
    left = kernel.chain(left, opcodes[0], rng)
  else:
    right = kernel.chain(right, opcodes[0], rng)
  rank = len(kernel.output_axes)
  numbers = [0] * 14
  numbers[1], numbers[7], numbers[13] = rank - 1, 1, rank - 1
  product = {"convolution": tuple(numbers), "contraction": kernel.sizes["k"]}
  x = kernel.add("convolution", kernel.output_axes, left, right, **product)
  kernel.chain(x, opcodes[1], rng)


def tile_configs(
  kernel: KernelBuilder, rng: np.random.Generator, *, configs: int, tiled: bool = True
) -> tuple[np.ndarray, np.ndarray]:
  """Distinct tiles and their runtimes, the compiler's own choice first.

  Args:
    kernel: the kernel.
    rng: draws the tiles and the compiler's misjudgement.
    configs: how many at most; small kernels have fewer.
    tiled: False for a kernel without a choice, which gets up to 32 rows of zeros. A kernel whose
      output and summed axis are one register each gets them too.

  Returns:
    Configuration features `[C, 24]` float32, noise-free runtimes `[C]` float64 ns.
  """
  units = {axes: _units(kernel, axes) for axes in (kernel.output_axes, kernel.kernel_axes)}
  extents = [*units[kernel.output_axes], *units[kernel.kernel_axes][:1]]
  if not tiled or max(extents) == 1:
    configs = min(configs, _UNTILED_CONFIGS)
    whole = [np.tile(u, (configs, 1)) for u in units.values()]
    features = np.zeros((configs, columns.TILE_CONFIG_FEATURES), np.float32)
    return features, tile_cost(kernel, *whole)[0]
  for drawn in _DRAWN:
    tiles = _draw(_extent_choices(extents, drawn * configs, rng), drawn * configs, rng)
    output = tiles[:, : len(kernel.output_axes)]
    kernel_tile = tiles[:, len(kernel.output_axes) :]
    if kernel.kernel_axes:  # the other axis of a kernel is the output's minor axis
      kernel_tile = np.concatenate([kernel_tile, output[:, -1:]], axis=1)
    runtime, resident = tile_cost(kernel, output, kernel_tile)
    # The tiles that fit on chip, or the smallest eight if few do.
    limit = max(program.VMEM_REGISTERS, np.sort(resident)[:8][-1])
    fitting = np.flatnonzero(resident <= limit)[:configs]
    if len(fitting) == configs:
      break
  guess = (runtime * np.exp(_COMPILER_ERROR * rng.standard_normal(len(runtime))))[fitting]
  fitting = np.roll(fitting, -guess.argmin())
  features = columns.released_tile_features(
    kernel_tile[fitting], output[fitting], output[fitting, :0]
  )
  return features, runtime[fitting]


def _units(kernel: KernelBuilder, axes: tuple[str, ...]) -> tuple[int, ...]:
  sizes = zip(axes, program.register_shape(len(axes)))
  return tuple(math.ceil(kernel.sizes[axis] / size) for axis, size in sizes)


def _extent_choices(extents: list[int], configs: int, rng: np.random.Generator) -> list[np.ndarray]:
  """Tile extents along each axis: divisors and one more, others if that is too few tiles."""
  choices = [_divisors(extent) for extent in extents]
  for _ in range(64):
    for extents_of_axis, extent in zip(choices, extents):
      extents_of_axis.add(int(rng.integers(1, extent + 1)))
    if math.prod(len(c) for c in choices) >= configs:
      break
  return [np.array(sorted(extents_of_axis)) for extents_of_axis in choices]


def _draw(choices: list[np.ndarray], configs: int, rng: np.random.Generator) -> np.ndarray:
  """`[C, axes]` distinct combinations, C at most `configs`, in random order."""
  sizes = [len(c) for c in choices]
  numbers = rng.choice(math.prod(sizes), size=min(configs, math.prod(sizes)), replace=False)
  return np.stack([c[i] for c, i in zip(choices, np.unravel_index(numbers, sizes))], axis=1)


def tile_cost(
  kernel: KernelBuilder, output_tile: np.ndarray, kernel_tile: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Noise-free runtimes of one kernel.

  Args:
    kernel: the kernel.
    output_tile: [C, output axes] int, tile of the output; the two minor axes
      count in registers, 8 and 128 elements (1024 where there is one axis).
    kernel_tile: [C, kernel axes] int, the same for a product's kernel.

  Returns:
    Runtimes `[C]` float64 nanoseconds; memory on chip `[C]` float64 registers.
  """
  tile = _elements(kernel.output_axes, output_tile)
  cut = _elements(kernel.kernel_axes, kernel_tile)
  cut = {axis: extent for axis, extent in cut.items() if axis not in tile}
  tiles = _pieces(kernel, tile)
  used = [operand for node in kernel.fused for operand in kernel.program.operands[node]]
  users = np.bincount(used, minlength=len(kernel.fused))
  output = _registers(kernel, kernel.root, tile)
  vector, memory, resident = 0 * output, output, 2 * output
  for node, demands in _demands(kernel).items():
    op = kernel.program.ops[node]
    share = BYTES[op.dtype] / 4
    for demand in demands:
      tiled = {axis: tile[axis] for axis in demand}
      registers = _registers(kernel, node, tiled)
      on_chip = _registers(kernel, node, tiled | cut)
      vector = vector + program.vector_cost(op.opcode) * registers
      if op.opcode == "parameter":
        memory = memory + registers * share
        resident = resident + 2 * on_chip * share
      elif users[node] > 1:
        resident = resident + on_chip
  depth = sum(kernel.program.contraction.values())
  matrix_ns = 2 * depth * program.REGISTER_ELEMENTS * output / program.FLOPS_PER_NS
  busy = vector / program.REGISTER_OPS_PER_NS + matrix_ns
  spilled = 2 * np.maximum(0, resident - program.VMEM_REGISTERS)
  cuts = _pieces(kernel, cut)
  starts = program.TILE_NS + cuts * (program.CUT_NS + spilled * _TRANSFER_NS)
  return tiles * (starts + np.maximum(busy, memory * _TRANSFER_NS)), resident


def _demands(kernel: KernelBuilder) -> dict[int, set[frozenset[str]]]:
  """Per instruction the sets of axes it is tiled along, one per way of needing it."""
  demands: dict[int, set[frozenset[str]]] = {node: set() for node in kernel.fused}
  demands[kernel.root].add(frozenset(kernel.output_axes))
  for node in reversed(kernel.fused):
    for used in kernel.program.operands[node]:
      demands[used] |= {demand & frozenset(kernel.axes[used]) for demand in demands[node]}
  return demands


def _elements(axes: tuple[str, ...], tile: np.ndarray) -> dict[str, np.ndarray]:
  """Extents `[C]` in elements of a tile `[C, axes]` given in register units."""
  return dict(zip(axes, (tile * program.register_shape(len(axes))).T))


def _pieces(kernel: KernelBuilder, tile: dict[str, np.ndarray]) -> np.ndarray:
  """Into how many pieces a tile cuts its axes, [C] float64."""
  pieces = [np.ceil(kernel.sizes[axis] / extent) for axis, extent in tile.items()]
  return np.prod(np.array(pieces), axis=0) if pieces else np.array(1.0)


def _registers(kernel: KernelBuilder, node: int, tile: dict[str, np.ndarray]) -> np.ndarray:
  """Registers of one instruction's result, [C]; axes that are not in `tile` in full."""
  axes = kernel.axes[node]
  counts = [
    np.ceil(np.minimum(tile.get(axis, kernel.sizes[axis]), kernel.sizes[axis]) / size)
    for axis, size in zip(axes, program.register_shape(len(axes)))
  ]
  return np.prod(np.broadcast_arrays(1.0, *counts), axis=0)
