"""Runtime of a fused kernel as a function of its tile.

The output is computed tile by tile. An instruction is evaluated for each tile
over the part of its axes that the tile needs: a tiled axis as far as the tile
goes, any other axis in full. Which axes are tiled for an instruction is handed
down from the root to the operands: below a reduction the reduced axis is needed
in full, and so is the summed axis of a product. So whatever feeds a reduction
or one operand of a product is computed anew for every tile along the axes it
lacks, and costs by its opcode.

    time = tiles * (start + cuts * (cut + spill) + max(vector + matrix, memory))

* vector: cost of the opcode x registers, over all tiles;
* matrix: multiply-adds of a product, whose summed axis the kernel tile cuts
  (elsewhere there is one cut);
* memory: parameters as often as tiles need them, and the output;
* spill: what does not fit on chip (parameters and output of two tiles, results
  with several users) is written out and read back at every start.

All sizes are in registers of 8 x 128 elements.
"""

from __future__ import annotations

import numpy as np

from tpugraphs_jax.data.synthetic import accelerator
from tpugraphs_jax.data.synthetic.program import BYTES
from tpugraphs_jax.data.synthetic.tile_kernels import Kernel

_TRANSFER_NS = accelerator.REGISTER_BYTES / accelerator.BYTES_PER_NS  # per register


def tile_cost(
    kernel: Kernel, output_tile: np.ndarray, kernel_tile: np.ndarray
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
  users = np.bincount([v for node in kernel.fused for v in kernel.program.operands[node]],
                      minlength=len(kernel.fused))
  output = _registers(kernel, kernel.root, tile)
  vector, memory, resident = 0 * output, output, 2 * output
  for node, demands in _demands(kernel).items():
    op = kernel.program.ops[node]
    share = BYTES[op.dtype] / 4
    for demand in demands:
      tiled = {axis: tile[axis] for axis in demand}
      registers = _registers(kernel, node, tiled)
      on_chip = _registers(kernel, node, tiled | cut)
      vector = vector + accelerator.vector_cost(op.opcode) * registers
      if op.opcode == "parameter":
        memory = memory + registers * share
        resident = resident + 2 * on_chip * share
      elif users[node] > 1:
        resident = resident + on_chip
  busy = vector / accelerator.REGISTER_OPS_PER_NS + _matrix_ns(kernel, output)
  spilled = 2 * np.maximum(0, resident - accelerator.VMEM_REGISTERS)
  cuts = _pieces(kernel, cut)
  each = (accelerator.TILE_NS + cuts * (accelerator.CUT_NS + spilled * _TRANSFER_NS) +
          np.maximum(busy, memory * _TRANSFER_NS))
  return tiles * each, resident


def _demands(kernel: Kernel) -> dict[int, set[frozenset[str]]]:
  """Per instruction the sets of axes it is tiled along, one per way of needing it."""
  demands = {node: set() for node in kernel.fused}
  demands[kernel.root].add(frozenset(kernel.output_axes))
  for node in reversed(kernel.fused):
    for used in kernel.program.operands[node]:
      demands[used] |= {demand & frozenset(kernel.axes[used]) for demand in demands[node]}
  return demands


def _elements(axes: tuple[str, ...], tile: np.ndarray) -> dict[str, np.ndarray]:
  """Extents `[C]` in elements of a tile `[C, axes]` given in register units."""
  return dict(zip(axes, (tile * accelerator.register_shape(len(axes))).T))


def _pieces(kernel: Kernel, tile: dict[str, np.ndarray]) -> np.ndarray:
  """Into how many pieces a tile cuts its axes, [C] float64."""
  return np.prod([np.ceil(kernel.sizes[a] / t) for a, t in tile.items()] or [1.0], axis=0)


def _registers(kernel: Kernel, node: int, tile: dict[str, np.ndarray]) -> np.ndarray:
  """Registers of one instruction's result, [C]; axes that are not in `tile` in full."""
  axes = kernel.axes[node]
  counts = [
      np.ceil(np.minimum(tile.get(axis, kernel.sizes[axis]), kernel.sizes[axis]) / size)
      for axis, size in zip(axes, accelerator.register_shape(len(axes)))]
  return np.prod(np.broadcast_arrays(1.0, *counts), axis=0)


def _matrix_ns(kernel: Kernel, output: np.ndarray) -> np.ndarray:
  """Matrix unit time per tile of the kernel's products."""
  depth = sum(kernel.program.contraction.values())
  flops = 2 * depth * accelerator.REGISTER_ELEMENTS * output
  return flops / accelerator.FLOPS_PER_NS
