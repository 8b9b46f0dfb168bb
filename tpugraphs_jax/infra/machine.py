"""This machine and this process: memory, the settings of glibc's allocator, signs of a TPU.

XLA's CPU backend allocates memory in every step. By default glibc returns large blocks to the
system, which clears them for the next step. On 2 cores the step of the benchmark `layout_step` took
1.0 to 1.4 s with glibc's defaults, and 0.3 to 0.5 s if freed memory stayed with the process. Small
steps become slower, because threads then share one arena: a step of tiles took a quarter longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import os
from pathlib import Path, PurePosixPath
import platform
import resource
import sys
from types import TracebackType

# Parameters of mallopt(3). One arena, because only the first one holds large blocks. Blocks beyond
# 512 MiB are mapped alone. At most 2 GiB of free memory stays at the end of the arena, so that the
# process holds a bounded amount of unused memory.
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_KEPT = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 512 << 20), (_TRIM_THRESHOLD, (2 << 30) - 1))


# First argument of a process that runs a command; Python has `-m` while it imports the package.
_COMMANDS = ("-m", "run_tile.py", "run_layout.py", "tpugraphs-tile", "tpugraphs-layout")


def is_primary() -> bool:
  """Whether this process is the only one of a run or its first: it writes files and lines."""
  jax = sys.modules.get("jax")
  return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def tell_interrupts() -> None:
  """Ends a command with a line, and without a traceback, after Ctrl-C during its imports.

  Later the command itself does so (`console.interrupted`). Has no effect in other processes.
  """
  if Path(sys.argv[0] if sys.argv else "").name not in _COMMANDS:
    return

  def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
      print("interrupted", file=sys.stderr)
    else:
      sys.__excepthook__(kind, error, trace)

  sys.excepthook = hook


def keep_freed() -> None:
  """Keeps freed memory with this process; call before its threads begin.

  Has no effect without glibc, or if the user has set `GLIBC_TUNABLES`.
  """
  if platform.libc_ver()[0] == "glibc" and not os.environ.get("GLIBC_TUNABLES"):
    libc = ctypes.CDLL(None)
    for parameter, value in _KEPT:
      libc.mallopt(parameter, value)


_LEAST_BYTES = 25 << 26  # that jax needs to start, measured on 2 cores
_MEMINFO, _CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# Files with the limit and the usage of a cgroup, of version 2 and of version 1.
_SECOND = ("memory.max", "memory.current")
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_RECLAIMABLE = ("inactive_file", "active_file")  # counted as used, and given back on demand


def described() -> str:
  """The system, the architecture and the processors, such as `Linux x86_64, 8 processors`."""
  return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"


def available() -> int:
  """Bytes that this process can still allocate: the least of machine, cgroups and `ulimit -v`."""
  page = os.sysconf("SC_PAGE_SIZE")
  limits = [os.sysconf("SC_PHYS_PAGES") * page]
  with contextlib.suppress(OSError):
    limits.append(_numbers(_MEMINFO)["MemAvailable:"] * 1024)
  for folder, limit, used in _groups():
    with contextlib.suppress(OSError, ValueError):  # no such group; a limit "max"
      cached = _numbers(folder / "memory.stat")
      free = int((folder / limit).read_text()) - int((folder / used).read_text())
      limits.append(free + sum(cached.get(name, 0) for name in _RECLAIMABLE))
  space, _ = resource.getrlimit(resource.RLIMIT_AS)
  if space != resource.RLIM_INFINITY:
    limits.append(space - _taken())
  return max(0, min(limits))


def check_address_space() -> None:
  """Refuses (ValueError) a limit under which jax cannot start and would abort."""
  space, _ = resource.getrlimit(resource.RLIMIT_AS)
  if space != resource.RLIM_INFINITY and space - _taken() < _LEAST_BYTES:
    raise ValueError(
      f"the limit on address space (ulimit -v) is {space // 1024:,} kB, too "
      f"little for jax: allow {(_taken() + _LEAST_BYTES) // 1024:,} or more"
    )


def limit(more: int) -> None:
  """Limits the address space of this process to `more` bytes beyond its present size."""
  _, hard = resource.getrlimit(resource.RLIMIT_AS)
  space = _taken() + more
  soft = space if hard == resource.RLIM_INFINITY else min(space, hard)
  resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _taken() -> int:
  """Bytes of address space of this process; 0 where the system does not say."""
  try:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
  except OSError:
    return 0
  return pages * os.sysconf("SC_PAGE_SIZE")


def _numbers(path: Path) -> dict[str, int]:
  """The lines `name number` of a file of the system."""
  lines = (line.split() for line in path.read_text().splitlines())
  return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def _groups() -> list[tuple[Path, str, str]]:
  """Folder, limit and use of every cgroup of this process with a limit of memory."""
  groups: list[tuple[Path, str, str]] = []
  with contextlib.suppress(OSError):
    for line in Path("/proc/self/cgroup").read_text().splitlines():
      _, controllers, name = line.split(":", 2)
      top, files = (_CGROUPS / "memory", _FIRST) if controllers else (_CGROUPS, _SECOND)
      if controllers in ("", "memory"):
        group = PurePosixPath(name.lstrip("/"))
        groups += [(top / parent, *files) for parent in (group, *group.parents)]
  return groups


_GOOGLE = "0x1ae0"  # vendor of PCI devices: TPUs, and network cards of its cloud
# Without them libtpu asks the metadata server of the cloud, and writes six lines of errors.
_OF_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v3-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_STDERR_LOG_LEVEL": "3",
}


def has_tpu_chips() -> bool:
  """Whether there are device files of TPU chips."""
  return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))


def may_have_tpu() -> bool:
  """Whether this machine has any sign of a TPU, or of a host in the cloud that may have one."""
  vendors = map(Path, glob.glob("/sys/bus/pci/devices/*/vendor"))
  return has_tpu_chips() or any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def be_quiet() -> None:
  """Keeps libtpu, where it is installed and there is no TPU, from writing errors about that.

  libtpu reads the environment when jax first looks for devices. Variables of the user stay.
  """
  if importlib.util.find_spec("libtpu") is not None and not may_have_tpu():
    for name, value in _OF_NO_TPU.items():
      os.environ.setdefault(name, value)
