import platform
import subprocess
import sys

import pytest

_FAULTS_OF_SECOND_ARRAY = """
import resource
import numpy as np
from tpugraphs_jax.train import host_memory

if {keep}:
  assert host_memory.keep_freed_memory()
for _ in range(2):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  array = np.full(2**25, 1, np.int8)
  faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
  del array
print(faults)
"""


def faults(keep: bool) -> int:
  """Page faults of an array of 32 MiB, after one like it has been freed."""
  code = _FAULTS_OF_SECOND_ARRAY.format(keep=keep)
  output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
  return int(output.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_freed_memory_is_used_again_without_page_faults():
  assert faults(keep=True) < 10 < faults(keep=False)
