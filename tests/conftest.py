"""Every test runs on four fake CPU devices, with rank promotion refused."""

import gc
import os
import pathlib
import shutil
import signal
import tempfile

# A reduction on CPU holds a thread until all devices have come to it. With as few
# threads as cores the fake devices can wait for each other for ever.
os.environ.setdefault("NPROC", "16")
# A shell starts what runs in its background with the signal of Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests already run on all cores. Small programs compile with less work in one part.
os.environ["XLA_FLAGS"] = " ".join(
  filter(None, (os.environ.get("XLA_FLAGS"), "--xla_cpu_parallel_codegen_split_count=1"))
)
# Slow tests, by lane, which `--lane` chooses: `make test-faults` and others. Paths are relative to
# this folder. `make test` runs all other tests, the lane `quick`.
LANES = {
  "browser": ("browser",),
  "faults": ("faults", "test_silence.py"),
  "hosts": (
    "infra/test_parallel.py",
    "infra/test_buckets.py",
    "infra/test_tasks.py",
    "test_collect.py",
  ),
  "runs": (
    "train/test_official_pipeline.py",
    "run/test_presets.py",
    "run/test_together.py",
    "tuning/test_training_loop.py",
    "train/test_training.py",
    "rankers/segments/test_command.py",
  ),
  "systems": (
    "rankers/systems",
    "rankers/test_fast_equals_plain.py",
    "rankers/test_lowering.py",
    "rankers/test_official_parity.py",
    "rankers/test_precision.py",
  ),
  "docs": ("docs", "test_examples.py"),
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


def pytest_addoption(parser):
  parser.addoption("--lane", choices=[*LANES, "quick"], help="run the tests of one lane alone")


def pytest_configure(config):
  """Makes a folder that all test processes share; they inherit its name.

  It holds the runs that many tests read, and the compiled programs of commands that tests start.
  Tests themselves compile hardly a program twice: to keep programs takes longer than it spares.
  """
  if "TPUGRAPHS_TESTS_SHARED" not in os.environ:
    folder = os.environ["TPUGRAPHS_TESTS_SHARED"] = tempfile.mkdtemp(prefix="shared")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # `.ci/run` names one for all lanes.
    os.environ.setdefault("TPUGRAPHS_TESTS_COMPILED", os.path.join(folder, "commands"))


def pytest_ignore_collect(collection_path, config):
  """Files of other lanes are not even imported."""
  asked = config.getoption("lane")
  if asked and collection_path.is_file():
    path = collection_path.relative_to(_HERE)
    lanes = (lane for lane, places in LANES.items() if any(map(path.is_relative_to, places)))
    return next(lanes, "quick") != asked or None
  return None


def pytest_collection_finish():
  """The garbage collector skips all that is imported: tracing makes very many small objects."""
  gc.freeze()
  gc.set_threshold(200_000, 20, 100)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
  """Three synthetic files a split of `tile:xla` and `layout:xla:random`; no test changes them."""
  return synthetic.generate(
    tmp_path_factory.mktemp("data"),
    collections=["tile:xla", "layout:xla:random"],
    limit=3,
    progress=False,
  )
