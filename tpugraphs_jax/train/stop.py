"""Stopping on SIGTERM and Ctrl-C without losing work."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import signal
import threading
from typing import Any

from tpugraphs_jax.train import parallel


class Interrupted(BaseException):
  """A signal came while work was going on that can be redone."""


class StopSignals:
  """Turns SIGTERM and Ctrl-C into a request to stop; a second one ends at once."""

  def __init__(self):
    self.received: int | None = None
    self._may_interrupt = False

  def __enter__(self) -> StopSignals:
    self._previous = {}
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._receive)
    return self

  def __exit__(self, *error: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _receive(self, number: int, frame: Any) -> None:
    del frame
    if self.received is not None:
      raise KeyboardInterrupt
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
