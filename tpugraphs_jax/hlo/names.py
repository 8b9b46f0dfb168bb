"""Where an instruction of a program comes from: operation, modules around it, shape."""

from __future__ import annotations

from collections.abc import Iterator
import re

from tpugraphs_jax import columns
from tpugraphs_jax.hlo import proto

_KINDS = {kind.number: kind.name for kind in columns.ELEMENT_TYPES + columns.LATER_TYPES}
# Parts of jax's names that stand for its own machinery, not for a module of the user.
_MACHINERY = frozenset(
  "body body_fun checkpoint closed_call cond cond_fun core_call custom_jvp_call custom_vjp_call "
  "custom_vjp_call_jaxpr pallas_call remat remat2 rematted_computation scan while".split()
)
_BRANCH = re.compile(r"branch_\d+_fun")
# The scope of equations whose layouts are chosen, before the number of their group.
LAYOUT_GROUP = "layout_group_"
_OUTER = re.compile(r"(?P<outer>\w+)\((?P<inner>.*)\)")


def operation(op_name: str) -> str:
  """The last part of jax's name of an operation: `dot_general` of `jit(f)/jvp(CNN)/dot_general`."""
  parts = list(_parts(op_name))
  return parts[-1] if parts else ""


def scope(op_name: str) -> str:
  """The modules and named scopes around an operation, such as `CNN/Conv_1`.

  Of an operation in the gradient `gradient of CNN/Conv_1`; empty where there is none.
  """
  scopes, is_gradient = [], False
  for part in list(_parts(op_name))[:-1]:
    while nested := _OUTER.fullmatch(part):
      is_gradient |= nested["outer"] == "transpose"
      part = "" if nested["outer"] in ("jit", "pjit") else nested["inner"]
    is_ours = part in _MACHINERY or part.startswith(LAYOUT_GROUP) or _BRANCH.fullmatch(part)
    if part and not is_ours:
      scopes.append(part)
  return "gradient of " * (is_gradient and bool(scopes)) + "/".join(scopes)


def shape(of: proto.ShapeProto) -> str:
  """A shape as XLA prints it without layout, such as `bf16[8,128]`; of a tuple its first array."""
  arrays = list(proto.arrays(of))
  first = arrays[0]
  text = f"{_KINDS.get(first.element_type, '?')}[{','.join(map(str, first.dimensions))}]"
  return text + f" and {len(arrays) - 1} more" * (len(arrays) > 1)


def _parts(op_name: str) -> Iterator[str]:
  """The parts between slashes, of which those in brackets separate nothing."""
  part, depth = "", 0
  for character in op_name:
    depth += (character == "(") - (character == ")")
    if character == "/" and depth <= 0:
      yield part
      part = ""
    else:
      part += character
  if part:
    yield part
