"""Every task is done once, here or on Beam; an error ends the rest."""

import os
from pathlib import Path
import subprocess
import sys
import time

import pytest

from tpugraphs_jax.infra import tasks


def write_number(task):
  folder, number = task
  with open(f"{folder}/{number}", "a") as file:
    file.write("x")
  return number * number


def assert_five_once(folder):
  found = {path.name: path.read_text() for path in folder.iterdir()}
  assert found == {str(n): "x" for n in range(5)}


def wait(task):
  time.sleep(0.05)
  return write_number(task)


def die(number):
  os._exit(1)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_task_is_done_once_and_results_come_in_order(tmp_path, processes):
  ended = []
  found = tasks.run(
    write_number, [(str(tmp_path), n) for n in range(5)], processes=processes, finished=ended.append
  )
  assert found == [0, 1, 4, 9, 16] == sorted(ended)
  assert_five_once(tmp_path)


def test_nothing_to_do_is_no_error():
  assert tasks.run(print, [], processes=4) == []


def stop(result):
  raise ValueError(f"{result} is bad")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_at_a_result_ends_the_rest(tmp_path, processes):
  with pytest.raises(ValueError, match="bad"):
    tasks.run(wait, [(str(tmp_path), n) for n in range(500)], processes=processes, finished=stop)
  assert len(list(tmp_path.iterdir())) < 500


def test_a_process_that_is_killed_is_an_error():
  with pytest.raises(OSError, match="killed"):
    tasks.run(die, range(3), processes=2)


def test_flags_of_beam_come_after_the_dashes():
  assert tasks.split_flags(["--a", "--", "--runner=X"]) == (["--a"], ["--runner=X"])
  assert tasks.split_flags(["--a"]) == (["--a"], None) and tasks.split_flags(["--"]) == ([], [])


@pytest.mark.parametrize("processes", [1, 3])
def test_beam_does_every_task_once(tmp_path, processes):
  pytest.importorskip("apache_beam", reason="no apache-beam: pip install apache-beam")
  tests = Path(__file__).parent
  code = (
    "import sys, warnings; warnings.simplefilter('ignore'); sys.path[:0] = sys.argv[2:]\n"
    "import test_tasks\nfrom tpugraphs_jax.infra import tasks\n"
    "tasks.run(test_tasks.write_number, [(sys.argv[1], n) for n in range(5)], "
    f"processes={processes}, beam=[])\n"
  )
  command = [sys.executable, "-c", code, tmp_path, tests, tests.parents[1]]
  ended = subprocess.run(command, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stderr[-2000:]
  assert_five_once(tmp_path)
