"""Lines, tables and progress of the commands. Lines begin with the time outside of a terminal.

A terminal shows a line as it is. In a log file or the output of a task every line begins with date
and time, and there are no progress bars, which rewrite their line. After a command has called
`install`, messages of `absl.logging` have the same form: information goes to standard output, and
warnings go to standard error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import difflib
import errno
import functools
import html
import inspect
import logging
import math
import os
from pathlib import Path
import re
import select
import signal
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType, ModuleType
from typing import Any, NoReturn, TextIO

import tqdm

from tpugraphs_jax.infra import machine

_ADVICE = {errno.EROFS: ": name a folder that can be written"} | dict.fromkeys(
  (errno.EACCES, errno.EPERM), ": check its permissions, or name another place"
)
_CELL = 'style="text-align: left; white-space: nowrap"'  # of a table in HTML
_LONGEST = 2000  # characters of a message
_DROP_EXCEPTIONS = ("_xla_gc_callback", "__del__")  # functions whose callers print what they raise
_ONCE_MORE = 0.05  # seconds until a signal that came in one of them is sent again
# Places in buckets by the local folder of their files: lines name the place, not the folder.
places: dict[str, str] = {}
_written = 0.0  # when the last line was written, of `time.monotonic`

size = functools.partial(tqdm.tqdm.format_sizeof, suffix="B")  # of bytes, such as `26.0kB`
duration = tqdm.tqdm.format_interval  # of seconds, such as `12:00` or `3:30:00`


def say(text: str) -> None:
  """Writes one or several lines to standard output; only the first process of a run does."""
  global _written
  if machine.is_primary():
    _written = time.monotonic()
    _write(text, sys.stdout)


def note(text: str) -> None:
  """Writes one or several lines to standard error; only the first process of a run does."""
  global _written
  if machine.is_primary():
    _written = time.monotonic()
    _write(text, sys.stderr)


class Work:
  """Long work, or a part of it: what it does and how far it is."""

  def __init__(self, what: str, total: float | None, unit: str, is_on: bool):
    self.what, self.is_on = what, is_on
    self._total, self._unit, self._count = total, unit, 0.0
    self._start = time.monotonic()
    self._bar = None
    if unit and is_on and machine.is_primary():
      is_size = unit == "B"
      self._bar = tqdm.tqdm(
        desc=what,
        total=total,
        unit=unit if is_size else f" {unit}",
        unit_scale=is_size,
        disable=None,  # outside of a terminal
        leave=False,
        delay=1.0,  # seconds; shorter work has no bar
      )

  def begin(self, what: str) -> None:
    """Names the part that begins now."""
    self.what = what

  def update(self, count: float = 1) -> None:
    """Counts what is done."""
    self._count += count
    if self._bar is not None:
      self._bar.update(count)

  def note(self, line: str) -> None:
    """Writes a line to standard error, unless nothing is wanted."""
    if self.is_on:
      note(line)

  def refresh(self, said: str) -> bool:
    """Draws the bar with what is done now; False where there is none, as outside of a terminal."""
    if self._bar is None or self._bar.disable:
      return False
    self._bar.set_postfix_str(_how_to_stop(), refresh=False)
    self._bar.set_description(said)
    return True

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()

  def __str__(self) -> str:
    if not self._unit:
      return self.what
    number = size if self._unit == "B" else "{:,.0f}".format
    of = "" if self._total is None else f" of {number(self._total)}"
    units = "" if self._unit == "B" else f" {self._unit}"
    return f"{self.what}, {number(self._count)}{of}{units}"

  @property
  def left(self) -> str:
    """How long it goes on at its rate so far; empty where that is unknown."""
    if not self._total or not 0 < self._count < self._total:
      return ""
    rest = (time.monotonic() - self._start) * (self._total / self._count - 1)
    return f", about {rest:,.0f} s left"


SECONDS = 10.0  # of long work between two lines
_PATIENCE = 0.7  # seconds that work may take to end after Ctrl-C without a line
_parts = threading.local()  # the work of each thread with its parts, the outermost first


@contextlib.contextmanager
def working(
  what: str, *, total: float | None = None, unit: str = "", is_on: bool = True
) -> Iterator[Work]:
  """Tells of the work in a block: after `SECONDS`, and after as many more, what it does.

  A line on standard error names the work and the parts that have begun inside, how far they are,
  how long it took so far, and how to stop it. On a terminal work with a unit has a bar. After
  Ctrl-C a line says what is waited for, unless the work ends within a second.

  Args:
    what: such as `storing layout:xla:random`.
    total: of the units that `Work.update` counts; None where it is not known.
    unit: such as `files`, or `B` for bytes; empty: nothing is counted.
    is_on: whether anything is written meanwhile, also of parts; False where a user is waited for.
  """
  parts = _parts.__dict__.setdefault("all", [])
  work = Work(what, total, unit, is_on and all(part.is_on for part in parts))
  with contextlib.ExitStack() as exits:
    exits.callback(work.close)
    parts.append(work)
    exits.callback(parts.remove, work)
    if len(parts) == 1 and work.is_on:
      exits.enter_context(_telling(parts))
    yield work


@contextlib.contextmanager
def _telling(parts: Sequence[Work]) -> Iterator[None]:
  """Another thread tells of the work of this one."""
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  is_main = threading.current_thread() is threading.main_thread()
  thread = threading.Thread(target=_tell, args=(parts, reader), name="progress", daemon=True)
  before = -1
  try:
    if is_main:  # Python writes numbers of signals also while a library keeps the main thread
      before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    yield
  finally:
    if is_main:
      signal.set_wakeup_fd(before)
    os.write(writer, bytes(1))  # 0 ends the thread
    thread.join()
    os.close(reader)
    os.close(writer)


def _tell(parts: Sequence[Work], reader: int) -> None:
  start = told = time.monotonic()
  interrupted = math.inf  # when Ctrl-C was pressed
  while True:
    if select.select([reader], [], [], min(SECONDS / 20, _PATIENCE / 4))[0]:
      numbers = os.read(reader, 4096)
      if 0 in numbers:
        return
      if signal.SIGINT in numbers:
        interrupted = time.monotonic()
    now, all_parts = time.monotonic(), list(parts)
    if not all_parts:  # Ctrl-C came while the work ended
      return
    if now > interrupted + _PATIENCE:
      interrupted = math.inf
      note(f"Ctrl-C: waiting for an end of: {': '.join(map(str, all_parts))}")
      continue
    if not all(part.is_on for part in all_parts):
      told = now
      continue
    inner = ": ".join(part.what for part in all_parts)
    if any(part.refresh(inner) for part in all_parts):
      continue
    told = max(told, _written)
    if now >= told + SECONDS:
      told = now
      left = next((part.left for part in all_parts if part.left), "")
      said = ": ".join(map(str, all_parts))
      if machine.is_primary():
        _write(f"{said}; {now - start:,.0f} s so far{left}; {_how_to_stop()}", sys.stderr)


def _how_to_stop() -> str:
  if "ipykernel" in sys.modules:
    return "stop it with Interrupt in the menu of the kernel"
  if sys.stdin is not None and sys.stdin.isatty():
    return "stop it with Ctrl-C"
  return f"stop it with `kill {os.getpid()}`"


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


def interrupted(advice: str = "") -> NoReturn:
  """Ends a command after Ctrl-C: one line on standard error, exit code 130.

  Args:
    advice: what is kept and how to go on, if anything.
  """
  print(f"interrupted{advice and ': '}{advice}", file=sys.stderr)
  sys.exit(130)


@contextlib.contextmanager
def _ctrl_c() -> Iterator[None]:
  """Lets Ctrl-C reach the command also where it comes while Python drops what is raised.

  jax calls back where garbage is collected, and so does Python where an object ends: an exception
  is printed there and does not go on. The signal then comes once more.
  """
  is_ours = threading.current_thread() is threading.main_thread()
  if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    yield
    return

  def raise_outside(number: int, frame: FrameType | None) -> None:
    if frame is None or frame.f_code.co_name not in _DROP_EXCEPTIONS:
      signal.default_int_handler(number, frame)
    threading.Timer(_ONCE_MORE, os.kill, (os.getpid(), number)).start()

  signal.signal(signal.SIGINT, raise_outside)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _place_of(error: BaseException, main: Callable[..., Any]) -> str:
  """Where code that a command runs for the user raised, such as `steps.py:12: `; else empty."""
  own = str(Path(__file__).parents[1])
  installed = (own, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
  place = ""
  of_command = inspect.getsourcefile(inspect.unwrap(getattr(main, "func", main)))
  for frame in traceback.extract_tb(error.__traceback__):
    if not frame.filename.startswith((*installed, str(of_command))):
      place = f"{Path(frame.filename).name}:{frame.lineno}: "
    elif frame.filename.startswith(own):
      place = ""  # the package raises it, on what it was given there
  return place


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


def parser(
  module: str,
  description: str | None,
  *,
  withdrawn: Mapping[str, str] | None = None,
  **options: Any,
) -> argparse.ArgumentParser:
  """A parser of the command `python -m tpugraphs_jax.MODULE`; lines of the description stay.

  Args:
    module: without the name of the package.
    description: of the command.
    withdrawn: flags that the command had, each with what to do instead, which their refusal says.
    **options: of `argparse.ArgumentParser`.
  """
  name, lines = f"python -m tpugraphs_jax.{module}", argparse.RawDescriptionHelpFormatter
  made = _Parser(name, description=description, formatter_class=lines, **options)
  for flag, advice in (withdrawn or {}).items():
    made.add_argument(flag, action=_Withdrawn, nargs="?", metavar=advice, help=argparse.SUPPRESS)
  return made


class _Parser(argparse.ArgumentParser):
  """A parser whose refusals are one line; a flag that is not known is told its nearest one."""

  def error(self, message: str) -> NoReturn:
    unknown, known = re.search(r"unrecognized arguments: (--[\w-]+)", message), self._flags()
    near = difflib.get_close_matches(unknown[1], known, 1) if unknown else []
    advice = f"; did you mean {near[0]}?" if near else f"; `{self.prog} --help` says what it takes"
    self.exit(2, f"error: {one_line(message)}{advice}\n")

  def _flags(self) -> list[str]:
    return [flag for action in self._actions for flag in action.option_strings]


class _Withdrawn(argparse.Action):
  """Refuses a flag that the command had; its `metavar` says what to do instead."""

  def __call__(self, parser, namespace, values, option_string=None):
    parser.error(f"{option_string} was withdrawn: {self.metavar}")


def check_seconds(flag: str, seconds: float) -> None:
  """Refuses (ValueError) a flag that is no number of seconds above 0."""
  if not 0 < seconds < math.inf:
    raise ValueError(f"{flag}={seconds}, expected seconds above 0")


def command(
  main: Callable[[Sequence[str] | None], int] | None = None, *, name: str = "", keeps: str = ""
) -> Callable[..., Any]:
  """Decorates a function that takes the arguments of a command and returns its exit status.

  The command tells of itself as long work does (`working`). After a mistake of the user, also in
  code that the user gave, it prints one line to standard error and returns status 2, and after
  Ctrl-C it returns 130.

  Args:
    main: the function.
    name: of the command; default: that of its module.
    keeps: what a command that Ctrl-C ends has kept, and how to go on.
  """
  if main is None:
    return functools.partial(command, name=name, keeps=keeps)
  spec = sys.modules["__main__"].__spec__ if main.__module__ == "__main__" else None
  module = spec.name if spec else main.__module__
  name = name or module.removesuffix(".__main__").split(".")[-1]

  @functools.wraps(main)
  def run(argv: Sequence[str] | None = None) -> int:
    try:
      with _ctrl_c(), working(name), explaining_devices():
        return main(argv)
    except KeyboardInterrupt:
      interrupted(keeps)
    except Exception as error:
      is_mistake = isinstance(error, ValueError | OSError | ImportError | MemoryError)
      if not (place := _place_of(error, main)) and not is_mistake:
        raise
      kind = "" if is_mistake else f"{type(error).__name__}: "
      print(f"error: {place}{kind}{one_line(error)}", file=sys.stderr)
      return 2

  return run


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
