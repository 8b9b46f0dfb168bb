"""How glibc keeps freed memory for computation on the CPU.

XLA's CPU backend asks for fresh memory in every step, and by default glibc returns large
blocks to the system, which clears them again in the next step. On 2 cores the step of
`benchmarks/layout_step.py` took 1.0 to 1.4 s with glibc's defaults, and 0.3 to 0.5 s where
freed memory stays with the process. For small steps it is a loss, since threads then share
one arena: a step of tiles took a quarter longer.
"""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of mallopt(3). One arena, since only the first one holds large blocks; blocks
# beyond 512 MiB get mappings of their own, and at most 2 GiB of free memory is kept at the
# end, so that the process holds a bounded amount beyond its need.
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_KEPT = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 512 << 20), (_TRIM_THRESHOLD, (2 << 30) - 1))


def keep_freed() -> None:
  """Keeps freed memory with this process; call before its threads begin.

  Does nothing without glibc, or where the user has set `GLIBC_TUNABLES`.
  """
  if platform.libc_ver()[0] == "glibc" and not os.environ.get("GLIBC_TUNABLES"):
    libc = ctypes.CDLL(None)
    for parameter, value in _KEPT:
      libc.mallopt(parameter, value)
