"""Stopping on SIGTERM and Ctrl-C without losing work."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import signal
import threading
from typing import Any

from tpugraphs_jax.infra import parallel

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
  """A signal came during work that can be redone."""


class StopSignals:
  """Turns SIGTERM and Ctrl-C into a request to stop; a second one ends the process at once.

  The second one works wherever the process waits (compilation, a device, a disk), and saves
  nothing: the newest checkpoint is what the run goes on from.
  """

  def __init__(self):
    self.received: int | None = None
    self._may_interrupt = False
    self._open = contextlib.ExitStack()

  def __enter__(self) -> StopSignals:
    if threading.current_thread() is threading.main_thread():
      self._open.enter_context(_second_signal_ends())
      for number in _STOP_SIGNALS:
        self._open.callback(signal.signal, number, signal.signal(number, self._receive))
    return self

  def __exit__(self, *error: Any) -> None:
    self._open.close()

  def _receive(self, number: int, frame: Any) -> None:
    del frame
    if self.received is not None:
      return
    self.received = number
    if self._may_interrupt:
      raise Interrupted

  @contextlib.contextmanager
  def interrupting(self) -> Iterator[None]:
    """Inside, a signal raises `Interrupted` at once: for work that can be redone.

    Not with several processes, which would be left waiting for this one.
    """
    self._may_interrupt = parallel.process_count() == 1
    try:
      if self._may_interrupt and self.received is not None:
        raise Interrupted
      yield
    finally:
      self._may_interrupt = False


@contextlib.contextmanager
def _second_signal_ends() -> Iterator[None]:
  """A thread that ends the process at the second signal.

  Handlers written in Python wait until the main thread is back from what it has called;
  the interpreter writes the number of a signal into this pipe at once.
  """
  numbers, written = os.pipe()
  os.set_blocking(written, False)
  previous = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
  watcher = threading.Thread(target=_end_at_second, args=(numbers,), name="stop", daemon=True)
  watcher.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(previous)
    os.close(written)  # which ends the thread
    watcher.join()
    os.close(numbers)


def _end_at_second(numbers: int) -> None:
  seen = 0
  while received := os.read(numbers, 1):
    seen += received[0] in _STOP_SIGNALS
    if seen == 2:
      os._exit(128 + received[0])
