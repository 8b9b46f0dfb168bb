"""Lines, tables and progress of the commands. Lines begin with the time outside of a terminal.

A terminal shows a line as it is. In a log file or the output of a task every line begins with date
and time, and there are no progress bars, which rewrite their line. After a command has called
`install`, messages of `absl.logging` have the same form: information goes to standard output, and
warnings go to standard error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import datetime
import errno
import functools
import html
import logging
import math
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any, NoReturn, TextIO

import tqdm

from tpugraphs_jax.infra import machine

_ADVICE = {errno.EROFS: ": name a folder that can be written"} | dict.fromkeys(
  (errno.EACCES, errno.EPERM), ": check its permissions, or name another place"
)
_CELL = 'style="text-align: left; white-space: nowrap"'  # of a table in HTML
_LONGEST = 2000  # characters of a message
# Places in buckets by the local folder of their files: lines name the place, not the folder.
places: dict[str, str] = {}

size = functools.partial(tqdm.tqdm.format_sizeof, suffix="B")  # of bytes, such as `26.0kB`
duration = tqdm.tqdm.format_interval  # of seconds, such as `12:00` or `3:30:00`


def say(text: str) -> None:
  """Writes one or several lines to standard output; only the first process of a run does."""
  if machine.is_primary():
    _write(text, sys.stdout)


@contextlib.contextmanager
def telling(is_on: bool, seconds: float = 10.0) -> Iterator[Callable[[str, str], None]]:
  """Lines on standard error about long work, and how long each part of it takes.

  Args:
    is_on: whether anything is written.
    seconds: after so many seconds, and again after as many more, a line tells that a part goes on.

  Yields:
    A function of a line, which may be empty, and of the name of the part that begins now.
  """
  part, start, ended = "", time.monotonic(), threading.Event()

  def tell(line: str, begins: str) -> None:
    nonlocal part, start
    part, start = begins, time.monotonic()
    if line:
      print(line, file=sys.stderr, flush=True)

  def repeat() -> None:
    told = 0
    while not ended.wait(min(seconds, 0.5)):
      times = int((time.monotonic() - start) // seconds)
      if times > told and part:
        print(f"{part}: {times * seconds:.0f} s so far", file=sys.stderr, flush=True)
      told = times

  if not is_on:
    yield lambda line, begins: None
    return
  thread = threading.Thread(target=repeat, daemon=True)
  thread.start()
  try:
    yield tell
  finally:
    ended.set()
    thread.join()


def with_places(text: str) -> str:
  """The text with places in buckets instead of the local folders of their files."""
  for folder, place in places.items():
    text = text.replace(folder, place)
  return text


def printable(text: str) -> str:
  """The lines of a text with escapes for characters that a terminal takes for commands."""
  return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def some(names: Sequence[str]) -> str:
  """The first five names, and `...` behind them if there are more."""
  return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def one_line(said: object) -> str:
  """A text, or the message of an error, in one line of printable characters.

  Characters that cannot be printed, for example in names of a damaged file, become escapes. An
  error without a message gives the name of its type. An error of the system gives its file and its
  message, without its number. The middle of a very long text is left out.
  """
  if isinstance(said, MemoryError):
    said = f"not enough memory {f'({said}) ' if str(said) else ''}for this input on this machine"
  if isinstance(said, OSError) and said.errno is not None and said.strerror:
    advice = _ADVICE.get(said.errno, "")
    said = (f"{said.filename}: " * bool(said.filename)) + said.strerror + advice
  lines = (line.strip() for line in str(said).splitlines())
  words = " ".join(filter(None, lines)) or type(said).__name__
  if len(words) > _LONGEST:
    words = f"{words[: _LONGEST // 2].rstrip()} ... {words[-_LONGEST // 2 :].lstrip()}"
  return printable(words.replace("\t", " "))


def to_install(extra: str) -> str:
  """How to install the packages of an extra, at the end of a message."""
  return f'run `pip install ".[{extra}]"` in a clone of tpugraphs_jax'


def fail(message: object) -> NoReturn:
  """Ends a command that was used wrongly: one line on standard error, exit code 2."""
  print(f"error: {with_places(one_line(message))}", file=sys.stderr)
  sys.exit(2)


@dataclasses.dataclass(frozen=True)
class Table:
  """A table that is text on a terminal and HTML in a notebook.

  Columns without any content are left out.

  Attributes:
    head: a name for each column.
    rows: each with one text per column.
    title: a line above the table.
  """

  head: Sequence[str]
  rows: Sequence[Sequence[str]]
  title: str = ""

  def _columns(self) -> list[int]:
    return [column for column in range(len(self.head)) if any(row[column] for row in self.rows)]

  def __str__(self) -> str:
    table = [self.head, *self.rows]
    widths = {column: max(len(row[column]) for row in table) for column in self._columns()}
    line = lambda row: "  ".join(row[column].ljust(width) for column, width in widths.items())
    lines = "\n".join(line(row).rstrip() for row in table)
    return "\n\n".join(filter(None, [self.title, lines if widths else ""]))

  def _repr_html_(self) -> str:
    head, *rows = (
      "".join(f"<{tag} {_CELL}>{html.escape(row[column])}</{tag}>" for column in self._columns())
      for tag, row in [("th", self.head), *(("td", row) for row in self.rows)]
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = f"<p>{html.escape(self.title)}</p>" if self.title else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return title + table


class Tables:
  """A result that is text on a terminal, and tables in a notebook."""

  def _tables(self) -> Iterable[Table]:
    raise NotImplementedError

  def _notes(self) -> Iterable[str]:
    """Sentences below the tables."""
    raise NotImplementedError

  def __repr__(self) -> str:
    return str(self)

  def __str__(self) -> str:
    return "\n\n".join([*map(str, self._tables()), *self._notes()])

  def _repr_html_(self) -> str:
    notes = Table(["notes"], [[note] for note in self._notes()])
    return "".join(table._repr_html_() for table in (*self._tables(), notes))


def interrupted() -> NoReturn:
  """Ends a command after Ctrl-C: one line on standard error, exit code 130."""
  print("interrupted: finished work is kept; run the same command again", file=sys.stderr)
  sys.exit(130)


@contextlib.contextmanager
def explaining_devices() -> Iterator[None]:
  """Turns errors of jax that settings of the user cause into a ValueError of one line.

  `JAX_PLATFORMS` may name a device that is not here, and `JAX_TRANSFER_GUARD` forbid transfers.
  """
  try:
    yield
  except (RuntimeError, AssertionError) as error:
    if "Disallowed" in str(error) and "transfer" in str(error):
      raise ValueError(
        "jax's transfer guard (JAX_TRANSFER_GUARD) disallows transfers to and from devices, and "
        "this command needs them: unset the variable, or set it to allow or log"
      ) from None
    platforms, jax = os.environ.get("JAX_PLATFORMS"), sys.modules.get("jax")
    # jax has devices the second time where the first of several platforms is there.
    is_missing = "initialize backend" in str(error) or jax and not _has_devices(jax)
    if platforms and is_missing:
      raise ValueError(
        f"JAX_PLATFORMS is {platforms!r}, and jax finds no such device here: unset the variable, "
        "or install jax for that device"
      ) from None
    raise


def _has_devices(jax: ModuleType) -> bool:
  try:
    return bool(jax.devices())
  except (RuntimeError, AssertionError):
    return False


def parser(module: str, description: str | None, **options: Any) -> argparse.ArgumentParser:
  """A parser of the command `python -m tpugraphs_jax.MODULE`; lines of the description stay."""
  name, lines = f"python -m tpugraphs_jax.{module}", argparse.RawDescriptionHelpFormatter
  return argparse.ArgumentParser(name, description=description, formatter_class=lines, **options)


def check_seconds(flag: str, seconds: float) -> None:
  """Refuses (ValueError) a flag that is no number of seconds above 0."""
  if not 0 < seconds < math.inf:
    raise ValueError(f"{flag}={seconds}, expected seconds above 0")


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
  """Decorates a function that takes the arguments of a command and returns its exit status.

  After a mistake of the user the command prints one line to standard error and returns status 2.
  After Ctrl-C it prints a line and returns 130.
  """

  @functools.wraps(main)
  def run(argv: Sequence[str] | None = None) -> int:
    try:
      with explaining_devices():
        return main(argv)
    except (ValueError, OSError, ImportError, MemoryError) as error:
      print(f"error: {one_line(error)}", file=sys.stderr)
      return 2
    except KeyboardInterrupt:
      interrupted()

  return run


def bar(is_wanted: bool) -> bool | None:
  """The argument `disable` of a `tqdm` bar: None shows the bar on a terminal, True never."""
  return None if is_wanted and machine.is_primary() else True


def install() -> None:
  """Gives every message of the log the form of other lines; for commands."""
  logging.getLogger().handlers = [_Lines()]


def _write(text: str, stream: TextIO | None) -> None:
  if stream is None:  # the process was started without it
    return
  try:
    start = "" if stream.isatty() else f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} "
    lines = "\n".join(start + line for line in printable(with_places(text)).splitlines() or [""])
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # One write for all: processes may share a log.
    print(lines.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
  except (OSError, ValueError, LookupError) as error:  # its reader is gone; it was closed
    _discard(stream, error)


def _discard(stream: TextIO, error: Exception) -> None:
  """Replaces a broken standard output or error by the null device, after one warning.

  The run goes on.
  """
  nowhere = open(os.devnull, "w", encoding="utf-8")
  if stream is not sys.stdout:
    sys.stderr = nowhere
    return
  sys.stdout = nowhere
  logging.getLogger("absl").warning(
    "standard output cannot be written (%s): the run goes on without", error
  )


class _Lines(logging.Handler):
  """Writes messages as lines."""

  def emit(self, record: logging.LogRecord) -> None:
    try:
      self._tell(record)
    except Exception:  # As handlers do: a log that cannot be written stops no run.
      self.handleError(record)

  def _tell(self, record: logging.LogRecord) -> None:
    is_warning = record.levelno >= logging.WARNING
    if not is_warning and record.name != "absl":
      return  # information of other libraries, which no user needs
    text = f"{record.levelname.lower()}: " * is_warning + record.getMessage()
    if record.exc_info:
      text += "\n" + logging.Formatter().formatException(record.exc_info)
    _write(text, sys.stderr if is_warning else sys.stdout)
