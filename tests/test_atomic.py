"""Files appear whole or not at all."""

import errno
import os

import numpy as np
import pytest

from tpugraphs_jax import atomic


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_complete_file_takes_its_place(tmp_path):
  path = tmp_path / "results.csv"
  path.write_text("old")
  with atomic.replacing(path, encoding="utf-8", newline="") as file:
    file.write("é\r\n")
    file.flush()
    assert path.read_text() == "old"
  assert path.read_bytes() == "é\r\n".encode()
  assert names(tmp_path) == ["results.csv"]


@pytest.mark.parametrize("existed", [True, False])
def test_an_error_leaves_what_was_there(tmp_path, existed):
  path = tmp_path / "results.csv"
  if existed:
    path.write_text("old")
  with pytest.raises(KeyboardInterrupt):
    with atomic.replacing(path) as file:
      file.write("half")
      raise KeyboardInterrupt
  assert names(tmp_path) == ["results.csv"] * existed
  assert not existed or path.read_text() == "old"


def test_a_full_disk_is_told_with_the_file(tmp_path):
  with pytest.raises(OSError, match="No space left .*: free some, .* --resume.*: .*/a.json") as error:
    with atomic.replacing(tmp_path / "a.json"):
      raise OSError(errno.ENOSPC, "No space left on device")  # as of a write
  assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
  with pytest.raises(OSError, match="quota exceeded: free some"):
    with atomic.replacing(tmp_path / "a.json"):
      raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
  with pytest.raises(OSError, match="Permission denied$"):
    with atomic.replacing(tmp_path / "a.json"):
      raise OSError(errno.EACCES, "Permission denied")


def test_what_is_being_written_matches_no_pattern_of_data_files(tmp_path):
  with atomic.replacing(tmp_path / "graph.npz", "wb") as file:
    np.savez(file, x=np.arange(3))
    assert not list(tmp_path.glob("*.npz"))
  assert np.load(tmp_path / "graph.npz")["x"].tolist() == [0, 1, 2]


def test_a_missing_folder_is_made(tmp_path):
  with atomic.replacing(tmp_path / "new" / "results.csv") as file:
    file.write("all")
  assert (tmp_path / "new" / "results.csv").read_text() == "all"


def test_what_ended_processes_left_is_removed_and_nothing_else(tmp_path):
  (tmp_path / ".results.csv.4242.partial").write_text("half")
  (tmp_path / ".graph.4242.partial").mkdir()
  (tmp_path / ".graph.4242.partial" / "rows.npy").write_text("half")
  (tmp_path / "results.csv.partial").write_text("the user's")
  with atomic.replacing(tmp_path / "living.csv") as file:
    file.write("all")
    atomic.tidy(tmp_path)
    assert len(names(tmp_path)) == 2
  assert names(tmp_path) == ["living.csv", "results.csv.partial"]
  assert (tmp_path / "living.csv").read_text() == "all"


def test_a_folder_that_is_not_there_is_tidy(tmp_path):
  atomic.tidy(tmp_path / "nowhere")
