"""A process keeps freed memory, unless its user has set `GLIBC_TUNABLES`."""

import os
import platform
import subprocess
import sys

import commands
import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")

_FAULTS = """
import resource
from tpugraphs_jax import host_memory
host_memory.keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = b"x" * (64 << 20)
del block
before = faults()
block = b"x" * (64 << 20)
print(faults() - before)
"""


@pytest.mark.parametrize("tunables, is_kept", [("", True), ("glibc.malloc.hugetlb=0", False)])
def test_freed_memory_is_kept_unless_the_user_set_glibc_tunables(tunables, is_kept):
  environment = os.environ | {"GLIBC_TUNABLES": tunables}
  faults = int(subprocess.check_output(
      [sys.executable, "-c", _FAULTS], env=environment, cwd=commands.ROOT))
  assert (faults < 5) == is_kept
