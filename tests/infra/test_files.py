"""Files are written whole or not at all, and one process at a time holds a folder."""

import concurrent.futures
import errno
import signal
import socket
import subprocess
import sys
import time

import commands
import pytest

from tpugraphs_jax.infra import files

_HOLD = """
import pathlib, sys, time
from tpugraphs_jax.infra import files
with files.hold(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  time.sleep(600)
"""


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_complete_file_takes_its_place(tmp_path):
  path = tmp_path / "results.csv"
  path.write_text("old")
  with files.replacing(path, encoding="utf-8", newline="") as file:
    file.write("é\r\n")
    file.flush()
    assert path.read_text() == "old"
  assert path.read_bytes() == "é\r\n".encode()
  assert names(tmp_path) == ["results.csv"]


@pytest.mark.parametrize("existed", [True, False])
def test_an_error_leaves_the_earlier_file(tmp_path, existed):
  path = tmp_path / "results.csv"
  if existed:
    path.write_text("old")
  with pytest.raises(KeyboardInterrupt):
    with files.replacing(path) as file:
      file.write("half")
      raise KeyboardInterrupt
  assert names(tmp_path) == ["results.csv"] * existed
  assert not existed or path.read_text() == "old"


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
  with pytest.raises(OSError, match="a.json") as error:
    with files.replacing(tmp_path / "a.json"):
      raise OSError(errno.ENOSPC, "No space left on device")  # as a write raises it
  assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_missing_folder_is_made(tmp_path):
  with files.replacing(tmp_path / "new" / "results.csv") as file:
    file.write("all")
  assert (tmp_path / "new" / "results.csv").read_text() == "all"


def test_partial_files_of_ended_processes_are_removed_and_no_others(tmp_path):
  (tmp_path / ".results.csv.4242.partial").write_text("half")
  (tmp_path / ".graph.4242.partial").mkdir()
  (tmp_path / ".graph.4242.partial" / "rows.npy").write_text("half")
  (tmp_path / "results.csv.partial").write_text("the user's")
  with files.replacing(tmp_path / "living.csv") as file:
    file.write("all")
    files.tidy(tmp_path)
    assert len(names(tmp_path)) == 2
  assert names(tmp_path) == ["living.csv", "results.csv.partial"]
  assert (tmp_path / "living.csv").read_text() == "all"


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the folder."""
  with subprocess.Popen(
    [sys.executable, "-c", _HOLD, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=commands.ROOT,
  ) as process:
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()


def test_a_folder_in_use_is_refused_in_a_line_with_host_and_process(tmp_path, holder):
  with pytest.raises(ValueError) as error, files.hold(tmp_path):
    pass
  expected = f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()}: "
  assert str(error.value).startswith(expected) and "\n" not in str(error.value)


def test_the_lock_of_a_killed_process_does_not_count(tmp_path, holder):
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  with files.hold(tmp_path), pytest.raises(ValueError, match="process"):
    with files.hold(tmp_path):
      pass


def test_a_lock_is_free_afterwards_whatever_happened(tmp_path):
  for _ in range(2):
    with pytest.raises(KeyError), files.hold(tmp_path):
      raise KeyError
  assert names(tmp_path) == [files.LOCK]


def test_waiting_threads_hold_a_folder_one_at_a_time(tmp_path):
  inside = []

  def enter(number):
    with files.hold(tmp_path, wait=True):
      inside.append(number)
      time.sleep(0.01)
      assert inside[-1] == number
    return number

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert sorted(pool.map(enter, range(4))) == list(range(4))
