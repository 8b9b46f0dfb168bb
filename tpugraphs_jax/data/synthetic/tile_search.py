"""Tile choices of one kernel, and its configurations with noise-free runtimes."""

from __future__ import annotations

import math

import numpy as np

from tpugraphs_jax import columns
from tpugraphs_jax.data.synthetic import accelerator
from tpugraphs_jax.data.synthetic.tile_cost import tile_cost
from tpugraphs_jax.data.synthetic.tile_kernels import Kernel, divisors

_DRAWN = (2, 6, 24)  # tiles drawn for each one wanted, more if too few fit on chip
_UNTILED_CONFIGS = 32
_COMPILER_ERROR = 0.1  # sd of the log of the compiler's own estimate


def tile_configs(
    kernel: Kernel, rng: np.random.Generator, *, configs: int, tiled: bool = True
) -> tuple[np.ndarray, np.ndarray]:
  """Distinct tiles and their runtimes, the compiler's own choice first.

  Args:
    kernel: the kernel.
    rng: draws the tiles and the compiler's misjudgement.
    configs: how many at most; small kernels have fewer.
    tiled: False for a kernel without a choice: up to 32 rows of zeros. So it is
      with an output of one register.

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
    output = tiles[:, :len(kernel.output_axes)]
    kernel_tile = tiles[:, len(kernel.output_axes):]
    if kernel.kernel_axes:  # the other axis of a kernel is the output's minor axis
      kernel_tile = np.concatenate([kernel_tile, output[:, -1:]], axis=1)
    runtime, resident = tile_cost(kernel, output, kernel_tile)
    kept = _fitting(resident, configs)
    if len(kept) == configs:
      break
  guess = (runtime * np.exp(_COMPILER_ERROR * rng.standard_normal(len(runtime))))[kept]
  kept = np.roll(kept, -guess.argmin())
  blocks = (kernel_tile[kept], output[kept], output[kept, :0])
  return np.concatenate([_block(tile) for tile in blocks], axis=1), runtime[kept]


def _fitting(resident: np.ndarray, configs: int) -> np.ndarray:
  """The first `configs` tiles that fit on chip, or the smallest eight if few do."""
  limit = max(accelerator.VMEM_REGISTERS, np.sort(resident)[:8][-1])
  return np.flatnonzero(resident <= limit)[:configs]


def _units(kernel: Kernel, axes: tuple[str, ...]) -> tuple[int, ...]:
  sizes = zip(axes, accelerator.register_shape(len(axes)))
  return tuple(math.ceil(kernel.sizes[axis] / size) for axis, size in sizes)


def _extent_choices(
    extents: list[int], configs: int, rng: np.random.Generator
) -> list[np.ndarray]:
  """Tile extents along each axis: divisors and one more, others if that is too few tiles."""
  choices = [divisors(extent) for extent in extents]
  for _ in range(64):
    for chosen, extent in zip(choices, extents):
      chosen.add(int(rng.integers(1, extent + 1)))
    if math.prod(len(c) for c in choices) >= configs:
      break
  return [np.array(sorted(chosen)) for chosen in choices]


def _draw(choices: list[np.ndarray], configs: int, rng: np.random.Generator) -> np.ndarray:
  """`[C, axes]` distinct combinations, C at most `configs`, in random order."""
  sizes = [len(c) for c in choices]
  picked = rng.choice(math.prod(sizes), size=min(configs, math.prod(sizes)), replace=False)
  return np.stack([c[i] for c, i in zip(choices, np.unravel_index(picked, sizes))], axis=1)


def _block(tile: np.ndarray) -> np.ndarray:
  """Eight features: up to six extents, their sum and product, 0 where there is none."""
  block = np.zeros((len(tile), 8), np.float32)
  block[:, :tile.shape[1]] = tile
  block[:, 6] = tile.sum(1)
  block[:, 7] = tile.prod(1) if tile.shape[1] else 0
  return block
