"""Runs, builds and sweeps that are killed at any file operation go on as if they had not been."""

import mmap
import os

import numpy as np
import pytest

from tests.support import commands, faults
from tpugraphs_jax import synthetic
from tpugraphs_jax.data import store

_COMMANDS = {
  "tile": ("run_tile.py", "--config=configs/tile.py:ci"),
  "segments and head": (
    "run_layout.py",
    "--config=configs/layout.py:xla-random,gst_efd,ci",
    "--config.segments.finetune.epochs=1",
  ),
}


@pytest.mark.parametrize("kind", _COMMANDS)
def test_killed_runs_go_on_as_if_they_had_not_been(kind, data_root, tmp_path):
  """The run is killed again while it is resumed."""

  def run(name, *flags, kill_at=0):
    workdir = tmp_path / name
    places = [f"--data_root={data_root}", f"--workdir={workdir}"]
    if kind != "tile":
      places.append(f"--config.data.store_dir={workdir / 'store'}")
    arguments = [*_COMMANDS[kind], *faults.SHORT, *places, *flags]
    return faults.run(arguments, tmp_path / "home", watched=str(workdir), kill_at=kill_at)

  whole = run("whole")
  assert whole.code == 0, whole.err
  expected = faults.contents(tmp_path / "whole")
  once, again = np.random.default_rng(0).integers(1, whole.operations + 1, 2).tolist()
  run("killed", kill_at=once)
  run("killed", "--resume", kill_at=again)
  ended = run("killed", "--resume")
  assert ended.code == 0, (once, again, ended.err)
  faults.assert_whole(tmp_path / "killed", expected)


# In a process without threads: builders are forks.
_BUILDERS = "import sys; from tests.faults import test_kills; test_kills.kill_builders(sys.argv[1])"


def test_killed_builders_of_a_store_leave_nothing_and_lose_nothing(tmp_path):
  ended = commands.python("-c", _BUILDERS, tmp_path, cwd=commands.ROOT)
  assert ended.returncode == 0, ended.stderr


def kill_builders(folder, points=6):
  """Kills builders at random operations, every second time also the next one."""
  collection = "layout:xla:random"
  data_root = synthetic.generate(f"{folder}/data", collections=[collection], progress=False)

  def build(name, kill_at=0):
    operations, child = mmap.mmap(-1, 8), os.fork()
    if not child:
      try:
        commands.count_operations(f"{folder}/stores", operations, kill_at=kill_at)
        place = f"{folder}/stores/{name}"
        store.ensure_store(data_root, collection, "train", workers=1, store_dir=place)
        os._exit(0)
      finally:
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, int.from_bytes(operations[:], "little")

  def files(name):
    return faults.all_files(commands.Path(folder, "stores", name))

  code, operations = build("whole")
  assert code == 0
  rng, expected = np.random.default_rng(0), files("whole")
  for number, kills in enumerate(rng.integers(1, operations + 1, (points, 2)).tolist()):
    for kill_at in kills[: 1 + number % 2]:
      build(f"killed_{number}", kill_at)
    assert build(f"killed_{number}")[0] == 0, kills
    assert files(f"killed_{number}") == expected, kills
