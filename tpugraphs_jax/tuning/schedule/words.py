"""Words of the scalar unit: what its operations compute of them.

A word that the schedule does not tell, such as a computed value, is an `Unknown`: it may be added
and compared, and only a branch or the size of a DMA that depends on it ends the execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import inspect
import operator
from typing import Any

import numpy as np

from tpugraphs_jax.tuning.schedule.bundles import Unreadable

_MASK, _SIGN, _WORD_BITS = 0xFFFFFFFF, 0x80000000, 32
ALLOCATION_BITS = 18  # words between two allocations
MOST_ALLOCATIONS = 2 ** (32 - ALLOCATION_BITS) - 1
_MOST_PARAMETERS = 2**13
MOST_WORDS = 2**20  # of scalar memory


class Unknown:
  """A word whose value the schedule does not tell.

  Args:
    why: a short clause, such as "operand 2 of the kernel has no value".
    guess: its value where the choice between two sizes depends on it; None: none is made.
    is_data: whether data decides it: no operation that is not known, and no operand without a
      value.
    allocation: where it is an address, the number of the allocation in which it lies; None: it may
      lie anywhere.
  """

  __slots__ = ("allocation", "guess", "is_data", "why")

  def __init__(
    self, why: str, guess: Any = None, *, is_data: bool = False, allocation: int | None = None
  ):
    self.why, self.guess, self.is_data, self.allocation = why, guess, is_data, allocation

  def _same(self, *_: Any) -> Unknown:
    return self

  def __add__(self, other: Any) -> Unknown:
    """An unknown number of words after the start of an allocation is an address in it."""
    if self.allocation is None and other.__class__ is int and other >> ALLOCATION_BITS:
      allocation = other >> ALLOCATION_BITS
      return Unknown(self.why, self.guess, is_data=self.is_data, allocation=allocation)
    return self

  __radd__ = __add__
  __sub__ = __rsub__ = __or__ = __ror__ = __xor__ = __rxor__ = _same
  __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same
  __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
  __lt__ = __le__ = __gt__ = __ge__ = _same
  __hash__ = object.__hash__

  def __eq__(self, other: object) -> Any:
    return self

  def __ne__(self, other: object) -> Any:
    return self

  def __and__(self, other: Any) -> Any:
    return 0 if other.__class__ is not Unknown and other == 0 else self

  __rand__ = __mul__ = __rmul__ = __and__

  def __bool__(self) -> bool:
    raise Unreadable(self.why)


class Memory(dict):
  """Words of scalar memory by address.

  Args:
    unwritten: a word that nothing has written.

  Attributes:
    chip: the id of the chip.
    core: the number of the core in the chip.
  """

  def __init__(self, unwritten: Unknown):
    super().__init__()
    self.unwritten = unwritten
    self.chip = self.core = 0

  def fill(self, start: int, count: int, words: Sequence[Any] = ()) -> None:
    """Writes words from an address on; words beyond the given ones are unwritten again.

    Raises:
      Unreadable: there are more words than scalar memory can have.
    """
    if count > MOST_WORDS:
      raise Unreadable(f"a DMA moves {count} words into scalar memory, at most {MOST_WORDS} fit")
    given = min(len(words), count)
    for place in range(given):
      self[start + place] = words[place]
    first, end = start + given, start + count
    rest: Iterable[int] = range(first, end)
    if len(self) < end - first:
      rest = [address for address in self if first <= address < end]
    for address in rest:
      self.pop(address, None)

  def store(self, address: Any, word: Any) -> None:
    """Writes a word; at an unknown address it forgets all words that it may have changed."""
    if address.__class__ is not Unknown:
      self[address] = word
      return
    changed = (
      place
      for place in self
      if address.allocation is None or place >> ALLOCATION_BITS == address.allocation
    )
    for place in list(changed):
      self[place] = address

  def __missing__(self, address: Any) -> Unknown:
    return address if address.__class__ is Unknown else self.unwritten


def parameter_address(number: int) -> int:
  """The address of a parameter of the program; the allocations of its schedule are far below."""
  return (MOST_ALLOCATIONS - number << ALLOCATION_BITS) & _MASK


def parameter_number(address: int) -> int | None:
  """The parameter of the program at an address; None of other addresses."""
  number = MOST_ALLOCATIONS - (address >> ALLOCATION_BITS)
  return number if 0 <= number < _MOST_PARAMETERS and address == parameter_address(number) else None


def _signed(word: Any) -> Any:
  return (word ^ _SIGN) - _SIGN


def select(condition: Any, word: Any, otherwise: Any) -> Any:
  """One of two words."""
  if condition.__class__ is Unknown:
    if condition.guess is None:
      return word if word is otherwise else condition
    condition = condition.guess
  return word if condition else otherwise


def _and(a: Any, b: Any, _: Any) -> Any:
  return a & b


def _or(a: Any, b: Any, _: Any) -> Any:
  if (a.__class__ is Unknown and b is True) or (b.__class__ is Unknown and a is True):
    return True
  return a | b


def _nor(a: Any, b: Any, _: Any) -> Any:
  return _or(a, b, _) ^ True


def load(address: Any, memory: Any, _: Any) -> Any:
  """The word of an address of `Memory`."""
  return memory[address]


def store(address: Any, word: Any, memory: Any) -> Any:
  """Writes a word in `Memory`."""
  memory.store(address, word)


def _extreme(choose: Callable, sign: int) -> Callable:
  def of(a: Any, b: Any, _: Any) -> Any:
    if a.__class__ is Unknown or b.__class__ is Unknown:
      return a if a.__class__ is Unknown else b
    return choose(a ^ sign, b ^ sign) ^ sign

  return of


def _compare(relation: Callable, sign: int) -> Callable:
  def of(a: Any, b: Any, _: Any) -> Any:
    if relation in _EQUALITIES and _is_donated(a, b):
      return relation is operator.eq
    if a.__class__ is Unknown and a.guess is not None and b.__class__ is int:
      return Unknown(a.why, relation(a.guess ^ sign, b ^ sign), is_data=a.is_data)
    return relation(a ^ sign, b ^ sign)

  return of


_EQUALITIES = (operator.eq, operator.ne)


def _is_donated(a: Any, b: Any) -> bool:
  """Whether the address of an output, which the runtime gives, is compared with a parameter's.

  The program copies a donated parameter into its output unless both have one address, as they have
  where jax calls it.
  """
  unknown, address = (a, b) if a.__class__ is Unknown else (b, a)
  is_pair = unknown.__class__ is Unknown and address.__class__ is int
  return is_pair and parameter_number(address) is not None


# Functions of three words by the code of an operation; `scmp` has a relation in its code.
FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
  **dict.fromkeys(("smov", "pmov", "int_to_ptr", "reloc", "spop", "vpush"), lambda a, _, __: a),
  "scalar_parameter_address": lambda a, _, __: parameter_address(a),
  "sadd": lambda a, b, _: (a + b) & _MASK,
  "ssub": lambda a, b, _: (a - b) & _MASK,
  "smul": lambda a, b, _: (a * b) & _MASK,
  "smulhi.u32": lambda a, b, _: (a * b) >> _WORD_BITS,
  "smul.u24": lambda a, b, _: ((a & 0xFFFFFF) * (b & 0xFFFFFF)) & _MASK,
  **dict.fromkeys(("sand", "pand"), _and),
  **dict.fromkeys(("sor", "por"), _or),
  **dict.fromkeys(("sxor", "pxor"), lambda a, b, _: a ^ b),
  "pnand": lambda a, b, _: (a & b) ^ True,
  "pnor": _nor,
  "pneg": lambda a, _, __: a ^ True,
  "sshll": lambda a, b, _: (a << (b & 63)) & _MASK,
  "sshllo": lambda a, b, _: (((a + 1) << (b & 63)) - 1) & _MASK,  # ones move in
  "sshrl": lambda a, b, _: a >> (b & 63),
  "sshra": lambda a, b, _: (_signed(a) >> (b & 63)) & _MASK,
  "sc": lambda a, b, _: (a + b) > _MASK,  # the carry of an addition
  "scalar_lea": lambda a, b, _: (a + b) & _MASK,
  "scalar_select": select,
}


BOTH = "kDivAndRem"


def _division(of: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
  return lambda a, b, _: of(a, b) if b.__class__ is Unknown or b else Unknown("a / 0")


FUNCTIONS |= {
  "sdivrem.u32.kDiv": _division(lambda a, b: a // b),
  "sdivrem.u32.kRem": _division(lambda a, b: a % b),
  # Two words wait in the queue: the quotient, then the remainder.
  f"sdivrem.u32.{BOTH}": _division(lambda a, b: a // b | a % b << _WORD_BITS),
  "spop.drf": lambda a, _, __: a & _MASK,
  "spop.drf.second": lambda a, _, __: a >> _WORD_BITS,
}
_SIGNS = {"s32": _SIGN, "u32": 0}
_RELATIONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_EXTREMES = {"smin": min, "smax": max}


def _float(word: Any) -> np.float32:
  return np.uint32(word).view(np.float32)


def float_word(number: Any) -> int:
  """The word of a number in float32; infinity where it is too large."""
  with np.errstate(over="ignore"):
    return int(np.float32(number).view(np.uint32))


def _of_floats(of: Callable[..., Any], make: Callable[[Any], Any] = float_word) -> Callable:
  """A function of the words of as many float32 numbers as `of` takes."""
  count = len(inspect.signature(of).parameters)

  def compute(*words: Any) -> Any:
    unknown = next((word for word in words[:count] if word.__class__ is Unknown), None)
    if unknown is not None:
      return unknown
    with np.errstate(all="ignore"):
      return make(of(*map(_float, words[:count])))

  return compute


def _integer(number: np.float32) -> Any:
  """The word of a whole number; how the core rounds others is not known."""
  if not np.isfinite(number) or number != np.trunc(number) or abs(number) >= _SIGN:
    return Unknown(f"how {number} becomes an integer is not known")
  return int(number) & _MASK


_FLOAT_FUNCTIONS = {
  "sadd.f32": _of_floats(lambda a, b: a + b),
  "ssub.f32": _of_floats(lambda a, b: a - b),
  "smul.f32": _of_floats(lambda a, b: a * b),
  "smin.f32": _of_floats(lambda a, b: np.minimum(a, b)),
  "smax.f32": _of_floats(lambda a, b: np.maximum(a, b)),
  "sfloor.f32": _of_floats(lambda a: np.floor(a)),
  "sceil.f32": _of_floats(lambda a: np.ceil(a)),
  "scvt.f32.s32": _of_floats(lambda a: a, _integer),
  "scvt.s32.f32": lambda a, _, __: a if a.__class__ is Unknown else float_word(_signed(a)),
}


def function(code: str) -> Callable[[Any, Any, Any], Any] | None:
  """What an operation computes; None where it is not known."""
  base, *types = code.split(".")
  if base == "scmp" and len(types) > 1:
    relation, sign = _RELATIONS.get(types[0]), _SIGNS.get(types[1])
    if relation and types[1] == "f32":
      return _of_floats(lambda a, b: relation(a, b), bool)
    return _compare(relation, sign) if relation and sign is not None else None
  if code in _FLOAT_FUNCTIONS:
    return _FLOAT_FUNCTIONS[code]
  if base in _EXTREMES and types and types[0] in _SIGNS:
    return _extreme(_EXTREMES[base], _SIGNS[types[0]])
  if types and types[0][:1] in ("f", "b"):
    return None  # floating-point arithmetic
  return FUNCTIONS.get(code) or FUNCTIONS.get(base)
