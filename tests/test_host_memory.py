"""A script starts anew with its memory settings, once, and is otherwise the same."""

import os
from pathlib import Path
import platform
import subprocess
import sys

import pytest

from tpugraphs_jax import host_memory

_SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
from tpugraphs_jax import host_memory
print("started", flush=True)
host_memory.restart_with(host_memory.HUGE_PAGES, host_memory.KEPT)
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:], sys.flags.dev_mode)
"""

SETTINGS = f"{host_memory.HUGE_PAGES}:{host_memory.KEPT}"

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can")


def run(folder, tunables):
  path = folder / "script.py"
  path.write_text(_SCRIPT.format(root=str(Path(__file__).parents[1])))
  environment = {k: v for k, v in os.environ.items() if k != host_memory.VARIABLE} | tunables
  command = [sys.executable, "-X", "dev", path, "--workdir=a b", "*"]
  with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert lines[-1].startswith(f"{process.pid} "), "another process answered"
  return len(lines) - 1, lines[-1].split(" ", 1)[1]


@pytest.mark.parametrize("tunables, starts, expected", [
    ({}, 2, SETTINGS),
    ({host_memory.VARIABLE: "glibc.malloc.arena_max=2"}, 2,
     f"{SETTINGS}:glibc.malloc.arena_max=2"),
    ({host_memory.VARIABLE: "glibc.malloc.hugetlb=0"}, 1, "glibc.malloc.hugetlb=0"),
])
def test_the_program_restarts_once_with_its_arguments_and_options(
    tmp_path, tunables, starts, expected):
  assert run(tmp_path, tunables) == (starts, f"{expected} --workdir=a b * True")
