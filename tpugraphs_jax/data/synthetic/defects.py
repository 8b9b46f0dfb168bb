"""The known defects of the released data, put in on request.

* the first validation graph of `layout:xla:random` has only 481 configurations;
* up to five training graphs of `layout:xla:random` have 20 configurations, all
  of them the default;
* one training graph of `layout:xla:default` has its measurements shuffled in
  blocks;
* the first test graph of every layout collection is its first training graph.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.data.synthetic.scales import FileSpec

_FEW_CONFIGS = 481
_IDENTICAL_CONFIGS = 20


def graph_origin(spec: FileSpec) -> FileSpec:
  """The file whose graph this file has: itself, or the training graph it leaks."""
  leaks = spec.split == "test" and spec.index == 0
  return dataclasses.replace(spec, split="train") if leaks else spec


def defective_configs(spec: FileSpec, configs: int) -> int:
  """The number of configurations, where a defect changes it."""
  if _is(spec, "layout:xla:random", "valid") and spec.index == 0:
    return _FEW_CONFIGS
  return _IDENTICAL_CONFIGS if has_identical_configs(spec) else configs


def has_identical_configs(spec: FileSpec) -> bool:
  """Whether all configurations are the default."""
  last = 1 if spec.scale == "tiny" else 5
  return _is(spec, "layout:xla:random", "train") and 1 <= spec.index <= last


def shuffle_measured(
    spec: FileSpec, measured_ns: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """Measurements of the one spoilt graph in the wrong order of blocks, others as they are."""
  if not _is(spec, "layout:xla:default", "train") or spec.index != 2:
    return measured_ns
  blocks = np.array_split(measured_ns, max(8, len(measured_ns) // 100))
  return np.concatenate([blocks[i] for i in rng.permutation(len(blocks))])


def _is(spec: FileSpec, collection: str, split: str) -> bool:
  return (spec.collection, spec.split) == (collection, split)
