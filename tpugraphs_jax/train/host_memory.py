"""Keeps memory that a step on CPU has used for the next step."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
  """Asks glibc to keep freed memory; call it once, before the first step.

  XLA on CPU allocates the temporaries of a step in one piece and frees them after
  it. By default glibc gives so large a piece back to the system, which then
  clears and maps it page by page in the next step: on 2 cores half of the
  processor time of a layout training step. In exchange the process keeps its
  peak, and freed pieces of other sizes may add to it.

  Returns:
    Whether this was possible (Linux with glibc).
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
  if mallopt is None:
    return False
  # One arena that grows and is never trimmed, and no pieces outside of it.
  options = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
  return all([mallopt(option, value) for option, value in options.items()])
