"""How glibc hands out memory for computation on the CPU.

XLA's CPU backend asks for fresh memory in every step. Two things make that cheap for
large steps. Pages of 2 MiB instead of 4 KiB: the step of `benchmarks/host_memory.py`
took 0.20 instead of 0.50 s on 2 cores. And freed memory that stays with the process:
otherwise the system clears it again in every step, 40 ms of its time for a program of
40,000 nodes, though little in that benchmark. For small steps the second is a loss, as
threads then share one arena: a tile step took a quarter longer, 9.5 instead of 7.4 ms.
glibc does both, but only decides so when a process starts.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
# All memory in one arena, the only one that holds large blocks. Blocks beyond 512 MiB get
# mappings of their own, and no more than 2 GiB of free memory is kept at the end, so that
# what the process holds beyond its need is bounded.
KEPT = "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=536870912:" \
       "glibc.malloc.trim_threshold=2147483648"


def restart_with(*settings: str) -> None:
  """Starts the running program anew with these settings, where glibc has them.

  To be called first thing in a script. Returns where there is nothing to do: without
  glibc, and in a process whose `GLIBC_TUNABLES` name huge pages (with
  `glibc.malloc.hugetlb=0` it stays as glibc is by default). Other tunables are kept.
  Process number, arguments and environment stay.

  Args:
    *settings: `HUGE_PAGES`, for large steps also `KEPT`.
  """
  tunables = os.environ.get(VARIABLE, "")
  if HUGE_PAGES.partition("=")[0] in tunables or platform.libc_ver()[0] != "glibc":
    return
  # The last of two settings of one tunable holds: the user's come last.
  os.environ[VARIABLE] = ":".join(filter(None, (*settings, tunables)))
  sys.stdout.flush()
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
