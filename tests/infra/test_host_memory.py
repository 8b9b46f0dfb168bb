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
from tpugraphs_jax.infra import host_memory
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


@pytest.mark.parametrize("mebibytes", [1024, 1500])
def test_a_limit_under_which_jax_would_abort_is_refused_in_one_line(mebibytes, tmp_path):
  script = [sys.executable, "run_tile.py", "--config=MLP,ci", "--synthetic",
            f"--workdir={tmp_path / 'run'}"]
  ended = subprocess.run(["bash", "-c", f"ulimit -v {mebibytes << 10}; exec \"$@\"", "-", *script],
                         cwd=commands.ROOT, capture_output=True, text=True)
  assert ended.returncode == 2 and "ulimit -v" in ended.stderr
  assert len(ended.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()
