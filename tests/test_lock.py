"""One run at a time in a folder; who holds it is named, who is gone is recognised."""

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time

import commands
import pytest

from tpugraphs_jax import lock

_HOLD = """
import pathlib, sys, time
from tpugraphs_jax import lock
with lock.held(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the folder."""
  with subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE,
                        text=True, cwd=commands.ROOT) as process:
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()


def test_a_folder_in_use_is_refused_in_a_line_with_host_and_process(tmp_path, holder):
  with pytest.raises(ValueError) as error, lock.held(tmp_path):
    pass
  expected = f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}: "
  assert str(error.value).startswith(expected) and "\n" not in str(error.value)


def test_the_lock_of_a_killed_process_is_stale(tmp_path, holder):
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  assert (tmp_path / lock.FILE).read_text() == f"{socket.gethostname()} {holder.pid}\n"
  with lock.held(tmp_path):
    assert (tmp_path / lock.FILE).read_text() == f"{socket.gethostname()} {os.getpid()}\n"


def test_a_lock_is_free_afterwards_whatever_happened(tmp_path):
  for _ in range(2):
    with pytest.raises(KeyError), lock.held(tmp_path):
      raise KeyError
  assert (tmp_path / lock.FILE).read_text() == ""


def test_the_lock_of_another_host_counts_while_it_is_heard_of(tmp_path):
  path = tmp_path / lock.FILE
  path.write_text("elsewhere 17\n")
  with pytest.raises(ValueError, match="in use by process 17 on elsewhere .heard of .* ago"):
    with lock.held(tmp_path):
      pass
  old = time.time() - 1000
  os.utime(path, (old, old))
  with lock.held(tmp_path):
    pass


def test_an_owner_is_heard_of_again_and_again(tmp_path, monkeypatch):
  monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.01)
  with lock.held(tmp_path):
    os.utime(tmp_path / lock.FILE, (0, 0))
    deadline = time.monotonic() + 20
    while (tmp_path / lock.FILE).stat().st_mtime == 0:
      assert time.monotonic() < deadline
      time.sleep(0.01)


def test_those_that_wait_take_turns(tmp_path):
  inside = []

  def enter(number):
    with lock.held(tmp_path, wait=True):
      inside.append(number)
      time.sleep(0.01)
      assert inside[-1] == number
    return number

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert sorted(pool.map(enter, range(4))) == list(range(4))
