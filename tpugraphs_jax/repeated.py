"""Work that goes on beside other work, every few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import threading


@contextlib.contextmanager
def repeated(work: Callable[[], None], seconds: float, *, name: str) -> Iterator[None]:
  """Calls `work` every so many seconds, in a thread of this name, while the block runs.

  The first call comes after the first wait. The block ends after a call that has begun.
  """
  ended = threading.Event()

  def run() -> None:
    while not ended.wait(seconds):
      work()

  thread = threading.Thread(target=run, name=name, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
