"""HLO text to a serialized module, in a process of its own: a text can end its parser.

jax's parser runs out of its stack on nested text, and out of memory on large numbers.
"""

from __future__ import annotations

from collections.abc import Callable
import importlib
import subprocess
import sys
from typing import Any

from tpugraphs_jax.infra import console, machine

_SECONDS = 600.0  # limit for one text; a program of 40,000 instructions takes less than 2
_REFUSED = 3  # exit status where the parser said why


def module_of(text: str, where: str) -> bytes:
  """The serialized `HloModuleProto` of HLO text.

  Args:
    text: as XLA prints it.
    where: begins error messages.

  Raises:
    ValueError: no HLO text, a text that ends its parser, or no parser in this jaxlib.
  """
  try:
    process = subprocess.run(
      [sys.executable, "-m", __name__, str(machine.available())],
      input=text.encode(),
      capture_output=True,
      timeout=_SECONDS,
      check=False,
    )
  except subprocess.TimeoutExpired:
    raise ValueError(
      f"{where}: HLO text on which jax's parser took more than {_SECONDS:.0f} s"
    ) from None
  if process.returncode == 0:
    return process.stdout
  reason = console.one_line(process.stderr.decode(errors="replace"))
  if process.returncode == _REFUSED:
    raise ValueError(f"{where}: jax cannot parse this HLO text ({reason})")
  raise ValueError(f"{where}: HLO text that ended jax's parser (status {process.returncode})")


def _parser() -> Callable[[str], Any]:
  # No public module of jax parses HLO text; the parser has moved between these.
  for module in ("jaxlib._hlo", "jaxlib._jax"):
    try:
      return importlib.import_module(module).hlo_module_from_text
    except (ImportError, AttributeError):
      continue
  raise RuntimeError("there is no jaxlib that can; install jaxlib, or give a serialized module")


def main(argv: list[str]) -> int:
  """Reads HLO text and writes the module; `argv` has the bytes of memory that it may take."""
  try:
    parse = _parser()
    machine.limit(int(argv[0]))
    module = parse(sys.stdin.buffer.read().decode()).as_serialized_hlo_module_proto()
  except (RuntimeError, MemoryError) as error:
    print(console.one_line(error), file=sys.stderr)
    return _REFUSED
  sys.stdout.buffer.write(module)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
