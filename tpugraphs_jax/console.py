"""What is told while something runs: whole lines, with a time where nobody is watching.

On a terminal a line is shown as it is. Elsewhere (a log file, a job's output) each begins
with date and time, and progress bars, which rewrite their line, are left out. Messages of
the log (`absl.logging`) take the same form once a command has called `install`: what is
told goes to standard output, warnings go to standard error.
"""

from __future__ import annotations

import datetime
import io
import logging
import os
import sys
from typing import Any, TextIO


def say(text: str) -> None:
  """Tells something, in one line or several."""
  _write(text, sys.stdout)


def one_line(said: object) -> str:
  """A text, or what an error says, in one line of printable characters.

  Characters that cannot be printed, such as those of names in a damaged file, are written
  as escapes. An error that says nothing is told by the name of its type.
  """
  lines = (line.strip() for line in str(said).splitlines())
  words = " ".join(filter(None, lines)) or type(said).__name__
  return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def bar(is_wanted: bool) -> bool | None:
  """The argument `disable` of a `tqdm` bar: shown where it is wanted and on a terminal."""
  return None if is_wanted else True


def install() -> None:
  """Makes every message of the log a line like the others; for commands."""
  logging.getLogger().handlers = [_Lines()]


def _write(text: str, stream: TextIO) -> None:
  start = "" if stream.isatty() else f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} "
  # One write for all: processes may share a log.
  lines = "\n".join(start + line for line in text.splitlines() or [""])
  try:
    print(lines, file=stream, flush=True)
  except (OSError, ValueError) as error:  # its reader is gone; it was closed
    _discard(stream, error)


def _discard(stream: TextIO, error: Exception) -> None:
  """Sends what is written to a broken stream from here on nowhere, and says so once.

  What computes goes on: also buffers must not fail when the process ends (Python's manual).
  """
  is_output, nowhere = stream is sys.stdout, os.open(os.devnull, os.O_WRONLY)
  try:
    os.dup2(nowhere, stream.fileno())
  except (OSError, ValueError):  # no file of the system's
    if is_output:
      sys.stdout = _Nowhere()
  finally:
    os.close(nowhere)
  if is_output:
    logging.getLogger("absl").warning(
        "standard output cannot be written (%s): the run goes on without", error)


class _Nowhere(io.TextIOBase):
  """Forgets what is written."""

  def write(self, text: str) -> int:
    return len(text)


class _Lines(logging.Handler):
  """Writes messages as lines."""

  def emit(self, record: logging.LogRecord) -> None:
    try:
      self._tell(record)
    except Exception:  # As handlers do: a log that cannot be written stops no run.
      self.handleError(record)

  def _tell(self, record: Any) -> None:
    is_warning = record.levelno >= logging.WARNING
    if not is_warning and record.name != "absl":
      return  # What other libraries are about to do is of no use to anyone here.
    text = f"{record.levelname.lower()}: " * is_warning + record.getMessage()
    if record.exc_info:
      text += "\n" + logging.Formatter().formatException(record.exc_info)
    _write(text, sys.stderr if is_warning else sys.stdout)
