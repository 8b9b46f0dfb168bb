"""Final schedules as libtpu prints them: text to bundles.

A bundle is what a TPU core issues in one cycle. The parser keeps what the scalar unit does and
what starts or awaits a DMA. Of the vector operations of a bundle it keeps their numbers by unit.

    0x5b   : > { %2108 = vsyncadd (%p2320_p7), %s195_s0, 4294963200  ;;  %s203_s22 = sand.u32 1 }

`%s203_s22` is value 203 in the register `s22`: the schedule runs on registers, and the numbers of
values tell which operations need which. `(%p..)` is a predicate. Comments name arguments
(`/*hbm=*/`), regions, which branches jump to, and the instruction of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import re
from typing import NamedTuple, TypeAlias

MOST_TEXT = 256 * 2**20  # bytes of a schedule; the largest that was seen has 24 MB
_MOST_CODES = 2**12  # that are remembered; generations have a few hundred
_MOST_OF_OPERATION = 2**14  # bytes of an operation without its comments
UNITS = ("matrix", "vector", "load_store")


class Unreadable(ValueError):
  """A schedule that cannot be executed; the message is a short sentence that says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
  """A value that an operation reads.

  Attributes:
    number: of the value.
    register: that holds it, such as `s22` or `p7`; the result of a division waits in a queue, which
      is a register of that value alone.
  """

  number: int
  register: str


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
  """The address of an array or of flags that the compiler placed, by its name."""

  name: str


# An operand is the sum of its terms: `[smem:[#allocation6 + $0x1]]` has two.
Term: TypeAlias = int | float | Value | Allocation
Operand: TypeAlias = tuple[Term, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
  """An operation of the scalar unit, or one that starts or awaits a DMA.

  Attributes:
    code: with its type, as the schedule names it, such as sadd.s32.
    result: what it defines; None if nothing.
    operands: in order, without those that have a name.
    named: operands by name, such as `size_in_granules`.
    predicate: it runs only if this value is true; None: always.
    negated: whether it runs only if the predicate is false.
    otherwise: the result where it does not run; None: the register stays.
    text: the region of a branch, the instruction of a call, or the comment of a division or of the
      load of an id.
  """

  code: str
  result: Value | None = None
  operands: tuple[Operand, ...] = ()
  named: dict[str, Operand] = dataclasses.field(default_factory=dict)
  predicate: Value | None = None
  negated: bool = False
  otherwise: Operand | None = None
  text: str = ""

  def reads(self) -> Iterator[Value]:
    """All values that it reads."""
    if self.predicate is not None:
      yield self.predicate
    for operand in (*self.operands, *self.named.values(), self.otherwise or ()):
      yield from (term for term in operand if isinstance(term, Value))


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
  """What is issued in one cycle.

  Attributes:
    operations: those of `Operation`.
    regions: numbers of the regions that start here.
    ends: numbers of the regions that end here, without empty ones.
    units: operations of each of `UNITS`.
    delay: cycles that the core waits beside the one of the bundle.
    is_exit: whether it is the last one; its comment stands in the place of its regions.
    is_empty: whether it has no operation at all.
    products: number of a matrix unit, and the rows that it takes, for each product.
    predicates: numbers of the values on which its operations depend, vector operations too.
    traces: events that it writes for a profiler.
  """

  operations: tuple[Operation, ...]
  regions: tuple[int, ...]
  units: tuple[int, ...]
  delay: int = 0
  is_exit: bool = False
  is_empty: bool = False
  products: tuple[tuple[int, int], ...] = ()
  predicates: frozenset[int] = frozenset()
  ends: tuple[int, ...] = ()
  traces: int = 0


_START = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *>* *\{", re.MULTILINE)
_NAME = re.compile(r"/\*(\w+=)\*/")
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End)?(?: empty)? region (\d+)")
_END = re.compile(r"(?<!/)End region (\d+)")
_OPERATION = re.compile(
  r"\s*%[a-z]*(\d+)(?:_([a-z]+)(\d+))? = ([a-z][\w.\-]*(?:<[a-z ]*>)?)\s*(.*)", re.DOTALL
)
_ATTRIBUTE = re.compile(r"\[(?:thread|resolvable):[^\]]*\]\s*")
_VALUE = r"%[a-z]*(\d+)_([a-z]+\d+)"
_PREDICATE = re.compile(rf"\((!?){_VALUE}(?:, ([^()]+))?\),?\s*")
_PREDICATED = re.compile(r"\(!?%p(\d+)_p\d+\)")
_NEVER = re.compile(r"(?:\[.*\] )?\(0\),")  # a predicate that the compiler knew to be false
_READ = re.compile(r"%[a-z]*(\d+)(?:_([a-z]+\d+))?")
_FLOAT = re.compile(r"-?(\d+\.?\d*(e[-+]?\d+)?|inf|nan)")
_INTEGER = re.compile(r"\$?(-?\d{1,10}|0x[0-9a-f]{1,8})")
_ALLOCATION = re.compile(r"#(allocation\w+)")
_BRACKETS = re.compile(r"\[(?:[a-z]+:)?|\]")
_NAMED = re.compile(r"(\w+)=(.*)", re.DOTALL)
_TARGET = re.compile(r"target (?:= \$region|bundleno = .*, region = )(\d+)")
_INDEX = re.compile(r"index: (\d+), kind: (\w+)")
_HINT = re.compile(r"\s+\[#allocation\w+\]$")  # which array an address belongs to
_COMMA = re.compile(r",\s*(?![^\[]*\])")
_CALLEE = re.compile(r"%?([^\s=]+)(?: = .*)?", re.DOTALL)

_VECTOR_RESULTS = ("v", "vm")
_IGNORED = re.compile(
  r"vnop|vtrace|vsettm|vsyncmov|vrng|vsetiar|shalt|[scv]fence|compiler-scheduling-barrier|set\.?rngseed|spush\.sccf"
)
_TRACE = "vtrace"
_MATRIX = re.compile(r"vmat|vdwg|vlgmr|vxpose")
_LOAD_STORE = re.compile(r"vld|vst\b|cld|cst")
_SCALAR_OF_VECTORS = ("vsync", "vwait", "vdelay")
_CALLS = ("inlined_call", "call")  # of kernels; the second in large programs
_DIVISION = "sdivrem"
# A DMA from the scalar memory of one core of a chip into that of the other one, and its comment.
MESSAGE, _BETWEEN_CORES = "dma.smem_to_smem", "smem-to-smem"
_PRODUCT = "vmatmul"
# A vector whose first word becomes a scalar: `%420 = vpush %v393_v1`, then `%s421_s13 = spop %420`.
_PUSH = "vpush"
_PUSHED = re.compile(r"= vpush (?:\(!?%p\d+_p\d+\),? *)?%v(\d+)_v\d+")
_SUBLANES = re.compile(r" (?:sm|ss):[^\]]*")
_UNIT = re.compile(r"mxu(\d)")
_IDS = (
  "logical chip id",
  "physical chip id",
  "core id",
)  # comments of loads whose value is that of one device


def parse(text: str) -> list[Bundle]:
  """The bundles of a schedule, in order.

  Raises:
    Unreadable: the text is too large, has no bundles, or an operation that cannot be read.
  """
  if len(text) > MOST_TEXT:
    raise Unreadable(f"its schedule has {len(text) >> 20} MB, expected at most {MOST_TEXT >> 20}")
  pushed = frozenset(map(int, _PUSHED.findall(text)))
  starts = list(_START.finditer(text))
  if not starts:
    raise Unreadable("its schedule has no bundles")
  ends = [start.start() for start in starts[1:]] + [len(text)]
  return [_bundle(text[start.end() : end], pushed) for start, end in zip(starts, ends)]


def _bundle(text: str, pushed: frozenset[int]) -> Bundle:
  regions, ends = (
    (tuple(map(int, mark.findall(text))) if "region" in text else ()) for mark in (_REGION, _END)
  )
  operations, units, products, delay, traces = [], [0, 0, 0], [], 0, 0
  for part in text.split(";;"):
    match = _OPERATION.match(part)
    if match is None:
      continue
    code, rest = match[4], match[5]
    kind = _kind(code)
    if kind.is_ignored or _NEVER.match(rest):
      traces += code == _TRACE
      continue
    if kind.is_delay:
      delay += _delay(rest)
    elif kind.is_vector or match[2] in _VECTOR_RESULTS:
      units[kind.unit] += 1
      if kind.is_product:
        products.append(_product(code + rest))
      elif code == _PUSH or (code == "vld" and int(match[1]) in pushed):
        register = f"v{match[3]}" if match[2] else f"queue{int(match[1])}"
        operations.append(_operation(Value(int(match[1]), register), code, rest))
    else:
      register = f"{match[2]}{match[3]}" if match[2] else _queued(match[1], code)
      operations.append(_operation(Value(int(match[1]), register), code, rest))
  predicates = (
    frozenset(map(int, _PREDICATED.findall(text))) if "(!%p" in text or "(%p" in text else ()
  )
  return Bundle(
    tuple(operations),
    regions,
    tuple(units),
    delay,
    is_exit="/* exit bundle" in text,
    is_empty="=" not in text,
    products=tuple(products),
    predicates=frozenset(predicates),
    ends=ends,
    traces=traces,
  )


def _product(text: str) -> tuple[int, int]:
  """The matrix unit of a product, and its rows: a register has 8 of 4 bytes, else twice as many."""
  unit = _UNIT.search(text)
  return int(unit[1]) if unit else 0, 8 if ".f32" in text.partition(" ")[0] else 16


def _queued(number: str, code: str) -> str:
  return f"queue{int(number)}" if code.startswith(_DIVISION) else ""


class _Kind(NamedTuple):
  """What the code of an operation says of it.

  Attributes:
    is_ignored: whether it takes no part in the time.
    is_delay: whether the core waits.
    is_vector: whether it is a vector operation; others are where their result is a vector.
    unit: of `UNITS`, of a vector operation.
    is_product: whether a matrix unit multiplies.
  """

  is_ignored: bool
  is_delay: bool
  is_vector: bool
  unit: int
  is_product: bool


@functools.lru_cache(_MOST_CODES)
def _kind(code: str) -> _Kind:
  is_vector = code[0] == "v" and not code.startswith(_SCALAR_OF_VECTORS)
  return _Kind(
    bool(_IGNORED.match(code)),
    code.startswith("vdelay"),
    is_vector or code[:3] in ("cld", "cst"),
    0 if _MATRIX.match(code) else 2 if _LOAD_STORE.match(code) else 1,
    code.startswith(_PRODUCT),
  )


def _delay(text: str) -> int:
  number = _INTEGER.match(text)
  if number is None:
    raise Unreadable("a delay has no length")
  return int(number[1], 0)


def _operation(result: Value, code: str, rest: str) -> Operation:
  rest = _NAME.sub(r"\1", rest) if "=*/" in rest else rest
  comments = _COMMENT.findall(rest) if "/*" in rest else []
  text = _COMMENT.sub("", rest).rstrip("} \n")
  if len(text) > _MOST_OF_OPERATION:
    raise Unreadable(f"an operation has {len(text)} bytes, expected at most {_MOST_OF_OPERATION}")
  comment = comments[0].strip() if comments else ""
  if code in _CALLS:
    callee = _CALLEE.fullmatch(comment)
    comment = callee[1] if callee else ""
    return Operation(
      _CALLS[0], None, tuple(map(_operand, filter(None, _COMMA.split(text)))), text=comment
    )
  if code.startswith("inlined_call_operand"):
    index = _INDEX.search(text)
    return Operation(code, result, text=f"{index[2]} {index[1]}" if index else "")
  if code == "dma.general" and comment == _BETWEEN_CORES:
    code = MESSAGE
  text = _SUBLANES.sub("", _ATTRIBUTE.sub("", text))
  predicate = _PREDICATE.search(text)
  fields: dict = {"result": result if result.register else None}
  if predicate is not None:
    text = text[: predicate.start()] + text[predicate.end() :]
    fields |= {"negated": bool(predicate[1])}
    fields |= {"predicate": Value(int(predicate[2]), predicate[3])}
    if predicate[4] is not None:
      fields |= {"otherwise": _operand(predicate[4])}
  if code.startswith("sbr"):
    target = _TARGET.search(text)
    return Operation(code, text=target[1] if target else "", **fields)
  operands, named = _operands(text)
  is_told = code.startswith(_DIVISION) or (code == "sld" and comment in _IDS)
  return Operation(code, operands=operands, named=named, text=comment if is_told else "", **fields)


def _operands(text: str) -> tuple[tuple[Operand, ...], dict[str, Operand]]:
  """Operands in order, and operands with a name; an address comes before what is stored there."""
  operands, named = [], {}
  parts = [part for part in _COMMA.split(text.strip()) if part]
  if parts and parts[0].startswith("[") and "] " in parts[0]:  # sst [smem:..] %s1
    address, _, stored = parts[0].rpartition("] ")
    parts[:1] = [f"{address}]", stored]
  for part in parts:
    name = _NAMED.fullmatch(part)
    if name is not None:
      named[name[1]] = _operand(name[2])
    else:
      operands.append(_operand(part))
  return tuple(operands), named


def _operand(text: str) -> Operand:
  """Sums in sums, `[smem:[%s1_s0 + [#allocation2]]]`, are one sum."""
  text = _HINT.sub("", text.strip())
  return tuple(_term(term.strip()) for term in _BRACKETS.sub("", text).split("+"))


def _term(text: str) -> Term:
  if value := _READ.fullmatch(text):
    return Value(int(value[1]), value[2] or f"queue{int(value[1])}")
  if allocation := _ALLOCATION.fullmatch(text):
    return Allocation(allocation[1])
  if integer := _INTEGER.fullmatch(text):
    return int(integer[1], 0) & 0xFFFFFFFF
  if text in ("true", "false"):
    return int(text == "true")
  if _FLOAT.fullmatch(text):
    return float(text)
  raise Unreadable(f"the operand {text[:40]!r} cannot be read")
