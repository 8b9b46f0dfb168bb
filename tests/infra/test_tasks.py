"""Every task is done once, here or on Beam; an error ends the rest."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from tpugraphs_jax.infra import tasks

ROOT = Path(__file__).parents[2]


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
  code = (
    "import sys, warnings; warnings.simplefilter('ignore'); sys.path[:0] = sys.argv[2:]\n"
    "from tests.infra import test_tasks\nfrom tpugraphs_jax.infra import tasks\n"
    "tasks.run(test_tasks.write_number, [(sys.argv[1], n) for n in range(5)], "
    f"processes={processes}, beam=[])\n"
  )
  command = [sys.executable, "-c", code, tmp_path, ROOT]
  ended = subprocess.run(command, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stderr[-2000:]
  assert_five_once(tmp_path)


_SAFE = "open({ran!r}, 'w').close()\nraise ImportError('of the current folder')\n"
_POOL = """
import sys
from tpugraphs_jax.infra import tasks

if __name__ == "__main__":
  print(tasks.run(abs, [-1, -2], processes=2), sys.path.count(""))
"""


@pytest.mark.parametrize("name", ["pickle", "numpy", "multiprocessing", "jax"])
def test_processes_take_no_module_from_the_current_folder(tmp_path, name):
  ran = tmp_path / "ran"
  (tmp_path / "here").mkdir()
  (tmp_path / "here" / f"{name}.py").write_text(_SAFE.format(ran=str(ran)))
  (tmp_path / "script.py").write_text(_POOL)
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(  # a script, in whose path the current folder is not
    [sys.executable, str(tmp_path / "script.py")],
    cwd=tmp_path / "here",
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.stdout == "[1, 2] 0\n", done.stderr
  child = tasks.python_command("-c", f"import {name}, tpugraphs_jax; print('found')")
  found = subprocess.run(
    child, cwd=tmp_path / "here", env=tasks.python_environment(), capture_output=True, text=True
  )
  assert found.stdout == "found\n", found.stderr
  assert not ran.exists()


def test_the_environment_stays_as_the_user_has_it(monkeypatch):
  for value in (None, "0"):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if value:
      monkeypatch.setenv("PYTHONSAFEPATH", value)
    with pytest.raises(ValueError, match="bad"):
      tasks.run(abs, [-1, -2], processes=2, finished=stop)
    assert os.environ.get("PYTHONSAFEPATH") == value


_LEAVES = """
import sys, threading, time
from tpugraphs_jax.infra import tasks

def main(argv):
  threading.Thread(target=time.sleep, args=(10**6,)).start()
  print("said", end="")
  {end}

tasks.exit_at_once(main, [])
"""


@pytest.mark.parametrize(
  "end, status",
  [("return 4", 4), ("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('why')", 1), ("1 / 0", 1)],
)
def test_a_thread_that_never_ends_keeps_no_process(end, status):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", _LEAVES.format(end=end)]
  ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
  assert (ended.returncode, ended.stdout) == (status, "said")
  assert ("why" in ended.stderr) == ("why" in end) and ("ZeroDivision" in ended.stderr) == (
    "/" in end
  )


def test_a_signal_waits_for_the_end_of_a_block():
  with pytest.raises(SystemExit), tasks.stopping():
    with tasks.signals_wait():
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(0.01)
      inside = True
    pytest.fail("the signal is lost")
  assert inside and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
