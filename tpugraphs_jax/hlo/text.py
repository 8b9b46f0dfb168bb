"""Text and MLIR to a serialized HLO module, in a separate process: a text can end its parser.

jax's parsers run out of their stack on nested text, and out of memory on large numbers.
"""

from __future__ import annotations

from collections.abc import Callable
import importlib
import operator
import re
import subprocess
import sys
from typing import Any

from tpugraphs_jax.infra import console, machine, tasks

HLO, STABLEHLO = "HLO text", "StableHLO"
_SECONDS = 600.0  # limit for one text; a program of 40,000 instructions takes less than 2
_REFUSED = 3  # exit status where the parser said why
_PARSERS = {HLO: "hlo_module_from_text", STABLEHLO: "mlir.mlir_module_to_xla_computation"}
# PyTorch/XLA prints this attribute, which XLA's parser refuses.
_UNSPECIFIED = re.compile(rb",\s*+api_version\s*=\s*API_VERSION_UNSPECIFIED\b")
_COMMENTS = re.compile(rb"(?:\s|[#;].*\n)*+")  # that the parser does not know
_HEAD = re.compile(rb"^HloModule\b", re.MULTILINE)
_ENTRY = re.compile(rb"^[^\S\n]*+ENTRY\b", re.MULTILINE)  # one in each module
_ADVICE = {
  HLO: "expected one module as XLA prints it, lowered.as_text('hlo')",
  STABLEHLO: "write HLO, lowered.as_text('hlo')",
}
_CHECK = re.compile(r"Check failed:.*?(?=\*\*\*|\Z)", re.DOTALL)  # XLA's last words


def module_of(source: bytes, where: str, *, kind: str = HLO) -> bytes:
  """The serialized `HloModuleProto` of HLO text or StableHLO.

  Args:
    source: HLO as XLA prints it, below any lines of a log; StableHLO as text or as MLIR bytecode.
      Text is UTF-8.
    where: begins error messages.
    kind: `HLO` or `STABLEHLO`.

  Raises:
    ValueError: the parser refuses the source, the source ends its parser or has several modules, or
      there is no parser in this jaxlib.
  """
  if kind == HLO:
    if (entries := sum(1 for _ in _ENTRY.finditer(source))) > 1:
      raise ValueError(
        f"{where} has {entries} HLO modules, expected one: write each to a file of its own"
      )
    source = _as_xla_prints(source)
  try:
    process = subprocess.run(
      tasks.python_command("-W", "ignore", __file__, kind, str(machine.available())),
      input=source,
      capture_output=True,
      timeout=_SECONDS,
      check=False,
      env=tasks.python_environment(),
    )
  except subprocess.TimeoutExpired:
    raise ValueError(
      f"{where}: {kind} on which jax's parser took more than {_SECONDS:.0f} s"
    ) from None
  if process.returncode == 0:
    return process.stdout
  if process.returncode == _REFUSED:
    reason = console.one_line(process.stdout.decode(errors="replace"))
    raise ValueError(f"{where}: jax cannot read this {kind} ({reason}): {_ADVICE[kind]}")
  check = _CHECK.search(process.stderr.decode(errors="replace"))
  reason = console.one_line(check[0]) if check else f"status {process.returncode}"
  raise ValueError(f"{where}: {kind} that ended jax's parser ({reason})")


def _as_xla_prints(source: bytes) -> bytes:
  """HLO text without what XLA's parser does not know."""
  head = _HEAD.search(source)
  comments = _COMMENTS.match(source, head.start() if head else 0)
  assert comments is not None  # perhaps an empty one
  source = source[comments.end() :]
  return _UNSPECIFIED.sub(b"", source) if _UNSPECIFIED.search(source) else source


def _parser(kind: str) -> Callable[..., Any]:
  # No public module of jax has these parsers; they have moved between modules.
  for module in ("jaxlib._hlo", "jaxlib._jax"):
    try:
      return operator.attrgetter(_PARSERS[kind])(importlib.import_module(module))
    except (ImportError, AttributeError):
      continue
  raise RuntimeError("there is no jaxlib that can; install jaxlib, or give a serialized module")


def main(kind: str, memory: str) -> int:
  """Reads a source and writes the module, or the reason; `memory` is the bytes it may take."""
  try:
    parse, source = _parser(kind), sys.stdin.buffer.read()
    machine.limit(int(memory))
    if kind == HLO:
      parsed = parse(source.decode())
    else:
      parsed = parse(source, use_tuple_args=False, return_tuple=False)
    module = parsed.as_serialized_hlo_module_proto()
  except (RuntimeError, MemoryError) as error:
    print(console.one_line(error))
    return _REFUSED
  sys.stdout.buffer.write(module)
  return 0


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
