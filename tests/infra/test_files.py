"""Files are written whole or not at all, and one process at a time holds a folder."""

import concurrent.futures
import errno
import json
import os
import pathlib
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from tests.support import commands
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


_KILLED = """
import os, pathlib, signal, sys
from tpugraphs_jax.infra import files
with files.replacing(pathlib.Path(sys.argv[1])) as file:
  file.write("half")
  file.flush()
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_file_in_a_folder_removes_what_a_killed_process_left(tmp_path):
  command = [sys.executable, "-c", _KILLED, str(tmp_path / "results.csv")]
  assert subprocess.run(command, cwd=commands.ROOT).returncode == -signal.SIGKILL
  (tmp_path / ".other.partial").write_text("of another program")
  (tmp_path / f".mine.{os.getpid()}-0123abcd.partial").write_text("being written")
  assert len(names(tmp_path)) == 3
  with files.replacing(tmp_path / "page.html") as file:
    file.write("all")
  left = {".other.partial", f".mine.{os.getpid()}-0123abcd.partial", "page.html"}
  assert set(names(tmp_path)) == left


def test_an_error_names_the_file_and_not_its_partial_file(tmp_path):
  path = tmp_path / ("x" * 250)
  with pytest.raises(OSError) as error:
    with files.replacing(path):
      pass
  assert error.value.filename == str(path)


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


def _append_many(path, writer, count):
  for number in range(count):
    files.append(path, json.dumps({"writer": writer, "number": number}).encode())


def test_lines_of_several_processes_are_all_kept_whole_and_in_order(tmp_path):
  path, count = tmp_path / "new" / "labels.jsonl", 200
  start = commands.server().Process
  writers = [start(target=_append_many, args=(path, writer, count)) for writer in range(2)]
  for process in writers:
    process.start()
  for process in writers:
    process.join()
  records = [json.loads(line) for line in files.lines(path)]
  for writer in range(2):
    numbers = [record["number"] for record in records if record["writer"] == writer]
    assert numbers == list(range(count))
  assert len(records) == 2 * count


def test_a_line_that_a_kill_cut_short_goes_and_the_lines_before_it_stay(tmp_path):
  path = tmp_path / "labels.jsonl"
  for cut in (b"", b"fir", b"first\n", b"first\nsec", b"\n"):
    path.write_bytes(cut)
    files.append(path, b"last")
    assert path.read_bytes() == cut[: cut.rfind(b"\n") + 1] + b"last\n"


@pytest.fixture
def precious(tmp_path):
  """A file of the user that links lead to; it stays as it is."""
  path = tmp_path / "thesis.tex"
  path.write_text("ten years of work")
  yield path
  assert path.read_text() == "ten years of work"


@pytest.mark.parametrize("name", [".lock", ".lock.owner"])
def test_holding_a_folder_from_somebody_else_changes_no_file_that_its_links_lead_to(
  tmp_path, precious, name
):
  folder = tmp_path / "sent"
  folder.mkdir()
  (folder / name).symlink_to(precious)
  try:
    with files.hold(folder):
      assert "process" in (folder / files.LOCK).with_name(".lock.owner").read_text()
  except ValueError as error:
    assert name == ".lock" and f"a link to {precious}" in str(error)


@pytest.mark.parametrize("mode", ["w", "a", "ab", "a+b", "r+"])
def test_no_file_is_opened_through_a_link(tmp_path, precious, mode):
  (tmp_path / "log.txt").symlink_to(precious)
  with pytest.raises(ValueError, match="a link to"):
    files.open_plain(tmp_path / "log.txt", mode)
  (tmp_path / "new.txt").symlink_to(tmp_path / "missing")
  with pytest.raises(ValueError, match="a link to"):
    files.open_plain(tmp_path / "new.txt", mode)
  with pytest.raises(ValueError, match="a link to"):
    files.append(tmp_path / "new.txt", b"line")
  assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("mode", ["r", "w", "ab", "a+b"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_nobody_waits(tmp_path, mode):
  os.mkfifo(tmp_path / "log.txt")
  with pytest.raises(ValueError, match="pipe"):
    files.open_plain(tmp_path / "log.txt", mode)


def test_a_written_file_takes_the_place_of_a_link(tmp_path, precious):
  (tmp_path / "config.json").symlink_to(precious)
  files.write_json(tmp_path / "config.json", {})
  assert not (tmp_path / "config.json").is_symlink()


@pytest.mark.parametrize("name", ["a", "a/b/c"])
def test_a_folder_with_a_link_anywhere_below_is_refused(tmp_path, precious, name):
  folder = tmp_path / "sent"
  (folder / name).parent.mkdir(parents=True)
  files.check_plain(folder)
  (folder / name).symlink_to(precious.parent)
  for check in (files.check_plain, files.make_folder):
    with pytest.raises(ValueError, match="a link to"):
      check(folder)


def test_a_link_that_the_user_names_is_followed(tmp_path):
  (tmp_path / "disk").mkdir()
  (tmp_path / "run").symlink_to(tmp_path / "disk")
  files.check_plain(tmp_path / "run")
  files.check_way(tmp_path / "run", tmp_path / "run" / "store" / "train")
  with files.hold(tmp_path / "run"):
    pass


def test_a_link_on_the_way_to_a_folder_is_refused(tmp_path):
  (tmp_path / "data" / "layout").mkdir(parents=True)
  (tmp_path / "data" / "store").symlink_to(tmp_path / "data" / "layout")
  with pytest.raises(ValueError, match="a link to"):
    files.check_way(tmp_path / "data", tmp_path / "data" / "store" / "layout" / "train")


def test_only_a_folder_of_this_user_says_that_checksums_were_compared(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  path, compute, computed = tmp_path / "rows.npy", files.digest_of, []
  path.write_text("rows")
  digests, now = {path: compute(path)}, time.time()
  monkeypatch.setattr(time, "time", lambda: now + 60)  # the file was not changed just now
  monkeypatch.setattr(files, "digest_of", lambda path: computed.append(path) or compute(path))
  for _ in range(3):
    assert files.first_damaged(digests) is None
  assert computed == [path]
  (notes,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
  notes.chmod(0o777)  # somebody else could have made the notes
  assert files.first_damaged(digests) is None
  assert computed == 2 * [path]
  notes.rename(tmp_path / "elsewhere")
  (tmp_path / "elsewhere").chmod(0o700)
  notes.symlink_to(tmp_path / "elsewhere")
  assert files.first_damaged(digests) is None
  assert computed == 3 * [path]


def test_a_home_folder_that_is_not_known_is_a_line(monkeypatch):
  def nobody(name):
    raise KeyError(name)

  monkeypatch.delenv("HOME", raising=False)
  monkeypatch.delenv(files.CACHE, raising=False)
  monkeypatch.setattr(pwd, "getpwuid", nobody)
  monkeypatch.setattr(pwd, "getpwnam", nobody)
  for read in (files.cache, lambda: files.expanded("~"), lambda: files.fetch("~nobody/x")):
    with pytest.raises(ValueError, match="no home folder"):
      read()
  assert files.expanded("out/~x") == pathlib.Path("out/~x")
