"""The TPU compiler's library on machines without a TPU, where it compiles and looks for chips."""

from __future__ import annotations

import glob
import importlib.util
import os
from pathlib import Path

_GOOGLE = "0x1ae0"  # vendor of PCI devices: TPUs, and network cards of its cloud
# Without them libtpu asks the metadata server of the cloud, and writes six lines of errors.
_OF_NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v3-8",
              "TPU_WORKER_HOSTNAMES": "localhost", "TPU_STDERR_LOG_LEVEL": "3"}


def may_have_tpu() -> bool:
  """Whether this machine has any sign of a TPU, or of a host in the cloud that may have one."""
  return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")) or any(
      Path(vendor).read_text().strip() == _GOOGLE
      for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"))


def be_quiet() -> None:
  """Keeps libtpu, where it is installed and there is no TPU, from writing errors about that.

  It reads the environment when jax first looks for devices. Variables that are set stay.
  """
  if importlib.util.find_spec("libtpu") is not None and not may_have_tpu():
    for name, value in _OF_NO_TPU.items():
      os.environ.setdefault(name, value)
