"""Every test runs on four fake CPU devices, with rank promotion refused."""

import os
import shutil
import tempfile

# A reduction on CPU holds a thread until all devices have come to it. With as few
# threads as cores the fake devices can wait for each other for ever.
os.environ.setdefault("NPROC", "16")
# Tests compile much and compute little: leave out most of LLVM's work. Commands
# that tests start inherit both.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
  """Makes a folder for what all processes of the tests share; they inherit its name."""
  if "TPUGRAPHS_TESTS_SHARED" not in os.environ:
    folder = os.environ["TPUGRAPHS_TESTS_SHARED"] = tempfile.mkdtemp(prefix="shared")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
