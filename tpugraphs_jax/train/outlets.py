"""Where the report of a run goes: a file of lines, TensorBoard, standard output.

A run that computes is worth more than what is told of it. Each outlet that fails says so
once in the log and never stops, slows or ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping
import os
from pathlib import Path
import queue
import sys
import threading

from absl import logging
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

# Rows that wait for a slow disk; later ones are left out of TensorBoard.
_WAITING_ROWS = 1000
_CLOSE_SECONDS = 10.0  # what a finished run grants a slow disk


class Lines:
  """Lines appended to a file; where that fails they are tried again with the next one."""

  def __init__(self, path: Path):
    self._path, self._file = path, None
    self._waiting, self._is_warned = b"", False

  def write(self, line: str) -> None:
    """Appends a line, after those that could not be written before."""
    self._waiting += line.encode() + b"\n"
    self._try()

  def _try(self) -> None:
    try:
      if self._file is None:
        # Unbuffered: what was written is a prefix of all lines, whatever happens.
        self._file = self._path.open("ab", buffering=0)
      while self._waiting:
        self._waiting = self._waiting[self._file.write(self._waiting):]
    except OSError as error:
      if not self._is_warned:
        logging.warning("%s cannot be written (%s): the run goes on, and its lines are written "
                        "as soon as that is possible", self._path, error.strerror)
      self._is_warned = True

  def close(self) -> None:
    if self._waiting:
      self._try()
    if self._waiting:
      logging.warning("%s misses %d lines", self._path, self._waiting.count(b"\n"))
    if self._file is not None:
      self._file.close()


class Events:
  """TensorBoard scalars, written by a thread of their own.

  Args:
    folder: receives the event file.
    purge_step: earlier files' scalars from this step on are not shown.
  """

  def __init__(self, folder: Path, *, purge_step: int):
    self._folder, self._is_broken = folder, False
    self._rows: queue.Queue[event_pb2.Event | None] = queue.Queue(_WAITING_ROWS)
    self._rows.put(event_pb2.Event(
        step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)))
    self._thread = threading.Thread(target=self._run, name="TensorBoard", daemon=True)
    self._thread.start()

  def write(self, step: int, values: Mapping[str, float], *, wall_time: float) -> None:
    """Takes the scalars of a step; returns at once."""
    row = summary.Summary(value=[
        part for name, value in values.items() for part in summary.scalar(name, value).value])
    self._put(event_pb2.Event(step=step, wall_time=wall_time, summary=row))

  def _put(self, row: event_pb2.Event | None) -> None:
    if self._is_broken:
      return
    try:
      self._rows.put_nowait(row)
    except queue.Full:
      self._give_up("its disk is too slow")

  def _run(self) -> None:
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      file = event_file_writer.EventsWriter(str(self._folder / "events"))
      while (row := self._rows.get()) is not None:
        file.write_event(row)
        if self._rows.empty():
          file.flush()
      file.close()
    except Exception as error:  # of a full disk, a folder that is gone, TensorBoard's own
      self._give_up(str(error))

  def _give_up(self, reason: str) -> None:
    if not self._is_broken:
      self._is_broken = True
      logging.warning("%s cannot be written (%s): the run goes on without TensorBoard",
                      self._folder, " ".join(reason.split()))

  def close(self) -> None:
    """Waits until all is written, but not for ever."""
    self._put(None)
    self._thread.join(_CLOSE_SECONDS)


class Output:
  """Lines on standard output; on a terminal one that need not be kept is overwritten."""

  def __init__(self):
    self._is_line_open = self._is_broken = False

  def say(self, line: str, *, keep: bool = True) -> None:
    """Prints one line."""
    is_terminal = not self._is_broken and sys.stdout.isatty()
    start = "\r\033[K" if self._is_line_open else ""
    self._is_line_open = is_terminal and not keep
    self._print(start + line, end="" if self._is_line_open else "\n")

  def close(self) -> None:
    if self._is_line_open:
      self._print("", end="\n")

  def _print(self, text: str, *, end: str) -> None:
    if self._is_broken:
      return
    try:
      print(text, end=end, flush=True)
    except (OSError, ValueError) as error:  # its reader is gone; it was closed
      self._is_broken = True
      _discard_output()
      logging.warning("standard output cannot be written (%s): the run goes on without", error)


def say(line: str) -> None:
  """Prints one line, where anybody reads it."""
  Output().say(line)


def _discard_output() -> None:
  """Sends what is printed from here on nowhere: also what waits in buffers (Python's manual)."""
  try:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
  except (OSError, ValueError):
    pass
