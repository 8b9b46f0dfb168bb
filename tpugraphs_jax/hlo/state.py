"""State that a function changes in place: objects of Flax's nnx among its arguments.

A step under `nnx.jit` updates its model and its optimizer and need not return them. The objects are
split into arrays and a structure, as `nnx.split` does, and are merged anew for each trace, so that
a trace changes no object of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import sys
from typing import Any, NamedTuple

import jax


def _nnx() -> Any:
  """The module of nnx, where the caller has imported it: only then there are such objects."""
  return sys.modules.get("flax.nnx")


def is_object(value: Any) -> bool:
  """Whether a value has state that functions may change in place."""
  nnx = _nnx()
  return nnx is not None and isinstance(value, (nnx.Pytree, nnx.Variable))


def is_jitted_by_nnx(function: Any) -> bool:
  """Whether `nnx.jit` returned a function."""
  return _nnx() is not None and isinstance(function, _nnx_jit_type())


@functools.cache
def _nnx_jit_type() -> type:
  return type(_nnx().jit(lambda: None))


def is_in_transform() -> bool:
  """Whether a transform of nnx, which keeps changes of objects, calls the current function."""
  graph = getattr(_nnx(), "graphlib", None) or getattr(_nnx(), "graph", None)
  return bool(getattr(getattr(graph, "GRAPH_CONTEXT", None), "update_context_stacks", None))


class ObjectStructure(NamedTuple):
  """What is left of objects without their arrays; equal for objects that nnx takes as equal."""

  graph: Any  # nnx.GraphDef, which has the references that objects share
  tree: Any  # of the state

  @property
  def size(self) -> int:
    """How many arrays the objects have."""
    return self.tree.num_leaves

  def merge(self, arrays: Sequence[Any]) -> list[Any]:
    """New objects with these arrays."""
    return _nnx().merge(self.graph, jax.tree.unflatten(self.tree, arrays))

  def update(self, objects: list[Any], arrays: Sequence[Any]) -> None:
    """Gives objects of this structure other arrays, in place."""
    _nnx().update(objects, jax.tree.unflatten(self.tree, arrays))


def split(objects: list[Any]) -> tuple[list[Any], ObjectStructure | None]:
  """The arrays of objects, and their structure; None where there are no objects."""
  if not objects:
    return [], None
  graph, state = _nnx().split(objects)
  arrays, tree = jax.tree.flatten(state)
  return arrays, ObjectStructure(graph, tree)
