"""Comparison of nested values: arrays of parameters, and fields of configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import traverse_util
import jax

# Fields of a config that may differ in a resumed run, because they do not affect results.
_FREE_FIELDS = ("batch.config_chunk",)


def first_difference(value: Any, expected: Any) -> tuple[str, str, str] | None:
  """The first array whose shape or dtype differs between two pytrees; None where all agree.

  Returns:
    Its name, and its description in each tree, such as `float32[2, 3]` or `nothing`.
  """
  ours, theirs = _arrays(value), _arrays(expected)
  for name in sorted(ours.keys() | theirs.keys()):
    left, right = ours.get(name, "nothing"), theirs.get(name, "nothing")
    if left != right:
      return name, left, right
  return None


def _arrays(tree: Any) -> dict[str, str]:
  """Dtype and shape of each array of a pytree, by its name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def check_config(where: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Refuses (ValueError) a checkpoint of another config; the message lists the fields that differ.

  Args:
    where: the checkpoint, for the message.
    saved: nested fields (JSON types) of the checkpoint.
    current: nested fields of the run.
  """
  old, new = (traverse_util.flatten_dict(config, sep=".") for config in (saved, current))
  differences = []
  for name in sorted(old.keys() | new.keys()):
    there, here = old.get(name, "absent"), new.get(name, "absent")
    if there != here and name not in _FREE_FIELDS:
      differences.append(f"{name} is {there} there and {here} here")
  if differences:
    raise ValueError(
      f"{where} is a checkpoint of another config: {'; '.join(differences)}. Give the same "
      "values, or another --workdir"
    )
