"""The memory that reading takes, without the memory of the process."""

from __future__ import annotations

from collections.abc import Callable
import gc
import tracemalloc
from typing import Any

_SPARE = 2 << 20  # bytes: messages, objects of the reader itself


def assert_reading_takes(most: float, size: int, read: Callable[[], Any]) -> None:
  """A reader takes at most `most` bytes at a time for each of `size` bytes, also if it refuses."""
  gc.collect()
  tracemalloc.start()
  try:
    before, _ = tracemalloc.get_traced_memory()
    try:
      read()
    except ValueError as error:
      assert "\n" not in str(error) and len(str(error)) < 1000
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak - before <= most * size + _SPARE, f"{(peak - before) / size:.1f} bytes per byte"
