"""Runs whose disk fills up, whose folders vanish or whose devices change, and which are resumed."""

import contextlib
import shutil
import subprocess

import numpy as np
import pytest

from tests.support import faults, run_folders

_STEP = 3
_TILE = ("run_tile.py", "--config=configs/tile.py:ci", *faults.SHORT)
_LAYOUT = ("run_layout.py", "--config=configs/layout.py:xla-random,full,ci", *faults.SHORT)


def _command(folder, data_root):
  places = (f"--data_root={data_root}", f"--workdir={folder / 'workdir'}")
  return [*_LAYOUT, *places, f"--config.data.store_dir={folder / 'store'}"]


@pytest.fixture(name="whole", scope="module")
def _whole(data_root, tmp_path_factory):
  """The home and the working folder of an undisturbed run."""
  folder = tmp_path_factory.mktemp("whole")
  ended = faults.run(_command(folder, data_root), folder / "home")
  assert ended.code == 0, ended.err
  return folder / "home", folder / "workdir"


def _assert_in_one_line(ended):
  assert "Traceback" not in ended.err, ended.err
  assert not ended.code or ended.complaint


@contextlib.contextmanager
def _small_disk(folder, kib):
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
  if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("no small disk can be mounted here")
  try:
    yield
  finally:
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_line_and_the_run_goes_on_where_there_is_room(whole, data_root, tmp_path):
  home, workdir = whole
  needed = sum(map(len, faults.all_files(workdir).values())) // 1024
  with _small_disk(tmp_path / "disk", int(0.95 * needed)):
    disturbed = _command(tmp_path, data_root) + [f"--workdir={tmp_path}/disk/workdir"]
    ended = faults.run(disturbed, home)
    if (tmp_path / "disk/workdir").exists():
      shutil.copytree(tmp_path / "disk/workdir", tmp_path / "workdir")
  assert ended.code
  _assert_in_one_line(ended)
  resumed = faults.run([*_command(tmp_path, data_root), "--resume"], home)
  assert resumed.code == 0, resumed.err
  faults.assert_whole(tmp_path / "workdir", faults.contents(workdir))


@pytest.mark.parametrize("what", ["workdir/checkpoints", "data"])
def test_a_folder_that_vanishes_under_a_run_and_comes_back_loses_nothing(
  what, whole, data_root, tmp_path
):
  home, workdir = whole
  shutil.copytree(data_root, tmp_path / "data")
  command, place = _command(tmp_path, tmp_path / "data"), tmp_path / what
  gone = place.with_name(f"{place.name}.gone")
  ended = faults.run(command, home, shell_at_step=(_STEP, f"mv {place} {gone}"))
  _assert_in_one_line(ended)
  shutil.rmtree(place, ignore_errors=True)
  gone.rename(place)
  resumed = faults.run([*command, "--resume"], home)
  assert resumed.code == 0, resumed.err
  faults.assert_whole(tmp_path / "workdir", faults.contents(workdir))


def test_another_number_of_devices_goes_on_with_the_same_losses(data_root, tmp_path):
  command = [*_TILE, f"--data_root={data_root}", "--config.batch.graphs=4", "--do=train"]
  run = lambda name, *flags, **how: faults.run(
    [*command, f"--workdir={tmp_path / name}", *flags], tmp_path / "home", **how
  )
  losses = lambda name: {
    row["step"]: row.get("train/loss") for row in run_folders.metrics(tmp_path / name)
  }
  assert run("whole").code == 0  # on one device
  whole = losses("whole")
  assert f"saved step {_STEP}" in run("moved", devices=4, stop_at_step=_STEP).out
  resumed = run("moved", "--resume", devices=2)
  assert resumed.code == 0 and f"resumed at step {_STEP}" in resumed.out
  moved = losses("moved")
  assert whole.keys() == moved.keys()
  np.testing.assert_allclose(list(moved.values()), list(whole.values()), rtol=1e-4)
