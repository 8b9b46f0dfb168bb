"""Freed memory stays with the process; libtpu is quiet on machines without a TPU."""

import os
import platform
import signal
import subprocess
import sys

import pytest

from tests.support import commands
from tpugraphs_jax.infra import machine

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")

_FAULTS = """
import resource
from tpugraphs_jax.infra import machine
machine.keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = b"x" * (64 << 20)
del block
before = faults()
block = b"x" * (64 << 20)
print(faults() - before)
"""


@needs_glibc
@pytest.mark.parametrize("tunables, is_kept", [("", True), ("glibc.malloc.hugetlb=0", False)])
def test_freed_memory_is_kept_unless_the_user_set_glibc_tunables(tunables, is_kept):
  environment = os.environ | {"GLIBC_TUNABLES": tunables}
  faults = int(
    subprocess.check_output([sys.executable, "-c", _FAULTS], env=environment, cwd=commands.ROOT)
  )
  assert (faults < 5) == is_kept


@needs_glibc
@pytest.mark.parametrize("mebibytes", [1024, 1500])
def test_a_limit_under_which_jax_would_abort_is_refused_in_one_line(mebibytes, tmp_path):
  options = "--config=MLP,ci", "--synthetic", f"--workdir={tmp_path / 'run'}"
  script = [sys.executable, "run_tile.py", *options]
  ended = subprocess.run(
    ["bash", "-c", f'ulimit -v {mebibytes << 10}; exec "$@"', "-", *script],
    cwd=commands.ROOT,
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 2 and "ulimit -v" in ended.stderr
  assert len(ended.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "is_installed, may_have_tpu, kept",
  [(True, False, False), (True, True, True), (False, False, True)],
)
def test_the_environment_changes_only_without_a_tpu(monkeypatch, is_installed, may_have_tpu, kept):
  monkeypatch.setattr(os, "environ", {"TPU_ACCELERATOR_TYPE": "v4-8"})
  monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: is_installed or None)
  monkeypatch.setattr(machine, "may_have_tpu", lambda: may_have_tpu)
  machine.be_quiet()
  assert os.environ["TPU_ACCELERATOR_TYPE"] == "v4-8"  # the user's own
  assert (len(os.environ) == 1) == kept


@pytest.mark.parametrize(
  "command", [["-m", "tpugraphs_jax.report"], [str(commands.ROOT / "run_tile.py")]]
)
@pytest.mark.parametrize("error, is_told", [("KeyboardInterrupt", True), ("ImportError", False)])
def test_ctrl_c_during_the_imports_of_a_command_is_a_line(command, error, is_told, tmp_path):
  (tmp_path / "tqdm.py").write_text(f"raise {error}")
  paths = os.pathsep.join([str(tmp_path), str(commands.ROOT)])
  ended = subprocess.run(
    [sys.executable, *command],
    env={**os.environ, "PYTHONPATH": paths},
    capture_output=True,
    text=True,
  )
  assert (ended.stderr == "interrupted\n") == is_told
  assert ended.returncode == (-signal.SIGINT if is_told else 1)
  assert ("Traceback" in ended.stderr) != is_told
