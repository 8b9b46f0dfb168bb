"""Every test runs on four fake CPU devices, with rank promotion refused."""

import os
import pathlib
import shutil
import tempfile

# A reduction on CPU holds a thread until all devices have come to it. With as few
# threads as cores the fake devices can wait for each other for ever.
os.environ.setdefault("NPROC", "16")
# Slow tests, by lane. Each lane has a command of its own, such as `make test-faults`.
# `make test` runs all other tests. Paths are relative to this folder.
LANES = {
    "faults": ("faults",),
    "hosts": ("infra/test_parallel.py", "infra/test_remote.py", "infra/test_jobs.py",
              "collect/test_command.py"),
    "systems": ("run/test_presets.py", "run/test_together.py", "run/test_training.py",
                "rankers/systems", "rankers/test_lowering.py", "rankers/test_precision.py"),
    "docs": ("docs",),
}
_HERE = pathlib.Path(__file__).parent

import jax
import pytest

from tpugraphs_jax import synthetic
from tpugraphs_jax.infra import parallel

jax.config.update("jax_platforms", "cpu")
# Tests compile much and compute little. Commands that tests start inherit the flags.
parallel.compile_quickly()
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
  """Makes a folder that all test processes share; they inherit its name.

  It holds the runs that many tests read, and all compiled programs.
  """
  for lane in LANES:
    config.addinivalue_line("markers", f"{lane}: run by `make test-{lane}`")
  if "TPUGRAPHS_TESTS_SHARED" not in os.environ:
    folder = os.environ["TPUGRAPHS_TESTS_SHARED"] = tempfile.mkdtemp(prefix="shared")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
  jax.config.update(
      "jax_compilation_cache_dir", os.path.join(os.environ["TPUGRAPHS_TESTS_SHARED"], "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_collection_modifyitems(items):
  """Marks every test with its lane."""
  for item in items:
    path = item.path.relative_to(_HERE)
    for lane, places in LANES.items():
      if any(path.is_relative_to(place) for place in places):
        item.add_marker(lane)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
  """Three synthetic files a split of `tile:xla` and `layout:xla:random`; no test changes them."""
  return synthetic.generate(
      tmp_path_factory.mktemp("data"), collections=["tile:xla", "layout:xla:random"], limit=3,
      progress=False)
