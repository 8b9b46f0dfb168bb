"""Where the report of a run goes besides the console: a file of lines, TensorBoard.

A run that computes is worth more than what is told of it. Each outlet that fails says so
once in the log and never stops, slows or ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import contextlib
import json
from pathlib import Path
import queue
import threading
from typing import Any

from absl import logging
from flax import traverse_util
import numpy as np
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

# Rows that wait for a slow disk; later ones are left out of TensorBoard.
_WAITING_ROWS = 1000
_CLOSE_SECONDS = 10.0  # what a finished run grants a slow disk
_BINS = 30  # of a histogram


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
  """What TensorBoard shows, made and written by a thread of its own.

  Args:
    folder: receives the event file.
    purge_step: earlier files' scalars from this step on are not shown.
  """

  def __init__(self, folder: Path, *, purge_step: int):
    self._folder, self._is_broken = folder, False
    self._rows: queue.Queue[Callable[[], event_pb2.Event] | None] = queue.Queue(_WAITING_ROWS)
    self._rows.put(lambda: event_pb2.Event(
        step=purge_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)))
    self._thread = threading.Thread(target=self._run, name="TensorBoard", daemon=True)
    self._thread.start()

  def write(self, step: int, values: Mapping[str, float], *, wall_time: float) -> None:
    """Takes the scalars of a step; returns at once."""
    row = dict(values)
    self._put(lambda: event_pb2.Event(step=step, wall_time=wall_time, summary=_joined(
        summary.scalar(name, value) for name, value in row.items())))

  def histograms(
      self, step: int, values: Mapping[str, np.ndarray], *, wall_time: float
  ) -> None:
    """Takes arrays of a step, each `[n]`; numbers that are not finite are left out."""
    rows = {name: array[np.isfinite(array)] for name, array in values.items()}
    self._put(lambda: event_pb2.Event(step=step, wall_time=wall_time, summary=_joined(
        summary.histogram(name, array, bins=_BINS) for name, array in rows.items() if array.size)))

  def describe(self, config: Mapping[str, Any], *, metric: str, parameters: int) -> None:
    """Takes the nested fields of a config, and by which scalar runs are compared.

    The fields come as a text and as hyperparameters, with the number of parameters.
    """
    fields = {**traverse_util.flatten_dict(dict(config), sep="."), "parameters": parameters}
    table = "\n".join(["|field|value|", "|-|-|", *(f"|{k}|{v}|" for k, v in fields.items())])
    hparams = {name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
               for name, value in fields.items()}
    self._put(lambda: event_pb2.Event(summary=_joined([
        summary.text("config", table), summary.scalar("parameters", parameters),
        *summary.hparams(hparams, {metric: None})[:2]])))

  def _put(self, row: Callable[[], event_pb2.Event] | None) -> None:
    if self._is_broken:
      return
    try:
      self._rows.put_nowait(row)
    except queue.Full:
      self._give_up("its disk is too slow")

  def _run(self) -> None:
    file = None
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      file = event_file_writer.EventsWriter(str(self._folder / "events"))
      while (row := self._rows.get()) is not None:
        file.write_event(row())
        if self._rows.empty():
          file.flush()
      file.close()
    except Exception as error:  # of a full disk, a folder that is gone, TensorBoard's own
      self._give_up(str(error))
      with contextlib.suppress(Exception):  # the same again
        file.close()

  def _give_up(self, reason: str) -> None:
    if not self._is_broken:
      self._is_broken = True
      logging.warning("%s cannot be written (%s): the run goes on without TensorBoard",
                      self._folder, " ".join(reason.split()))

  def close(self) -> None:
    """Waits until all is written, but not for ever."""
    self._put(None)
    self._thread.join(_CLOSE_SECONDS)


def _joined(parts: Iterable[Any]) -> Any:
  """One summary with the values of several."""
  return summary.Summary(value=[value for part in parts for value in part.value])
