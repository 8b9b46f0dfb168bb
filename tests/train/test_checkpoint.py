"""Checkpoints are restored bit for bit, and an earlier one outlives a failed save."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, run_folders
from tests.support.comparing import assert_same_trees
from tpugraphs_jax.optimizer import Optimizer
from tpugraphs_jax.train import checkpoint
from tpugraphs_jax.train.step import TrainState

CONFIG = {"model": {"name": "sage", "hidden": 64}, "seed": 0}


@functools.cache
def make_state(step=0, width=3):
  optimizer = Optimizer(accumulation_steps=2, clip_norm=1.0, average_decay=0.9).create(10)
  rng = np.random.default_rng(step)
  params = {
    "kernel": jnp.asarray(rng.normal(size=(2, width)), jnp.float32),
    "scalar": jnp.asarray(rng.normal(), jnp.float32),
  }
  table = {"values": rng.normal(size=(5, 2)).astype(np.float32), "seen": np.ones(5, bool)}
  state = TrainState.create(params, optimizer).replace(extra=table)
  state = state.apply_gradients(jax.tree.map(jnp.ones_like, params), optimizer)
  return jax.tree.map(np.asarray, state.replace(step=np.int32(step)))


def save(checkpoints, step):
  progress = {"best_value": 0.1 + 0.2, "none": None}
  checkpoints.save(step, make_state(step), data={"next_index": step}, progress=progress)


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "checkpoints"


def test_newest_comes_back_bit_for_bit(folder):
  first = checkpoint.Checkpoints(folder, config=CONFIG)
  save(first, 7)
  first.close()
  second = checkpoint.Checkpoints(folder, config=CONFIG)
  saved = second.newest(make_state(0))
  assert_same_trees(saved.state, make_state(7))
  assert saved.step == 7 and saved.data == {"next_index": 7}
  assert saved.progress == {"best_value": 0.1 + 0.2, "none": None}


def test_a_reader_changes_nothing_where_a_run_is_saving(folder):
  save(checkpoint.Checkpoints(folder, config=CONFIG), 1)
  # Orbax' name of a checkpoint on its way.
  on_its_way = folder / "save_1.orbax-checkpoint-tmp"
  on_its_way.mkdir()
  before = sorted(path.name for path in folder.rglob("*"))
  reader = checkpoint.Checkpoints(folder, config=CONFIG, read_only=True)
  assert reader.newest(make_state()).step == run_folders.newest_of(folder).step == 1
  reader.check(resume=True)
  reader.close()
  assert sorted(path.name for path in folder.rglob("*")) == before


def test_a_reader_of_a_missing_folder_finds_nothing_and_makes_nothing(folder):
  reader = checkpoint.Checkpoints(folder, read_only=True)
  assert reader.newest(make_state()) is None
  reader.check(resume=False)
  reader.close()
  assert not folder.exists()


@pytest.mark.parametrize("reopen", [False, True])
def test_the_two_newest_are_kept_and_nothing_else(folder, reopen):
  checkpoints = checkpoint.Checkpoints(folder)
  for step in range(5):
    save(checkpoints, step)
    if reopen:
      checkpoints.close()
      checkpoints = checkpoint.Checkpoints(folder)
    assert checkpoints.newest(make_state()).step == run_folders.newest_of(folder).step == step
    expected = {f"save_{number}" for number in range(max(step - 1, 0), step + 1)}
    assert {path.name for path in folder.iterdir()} == expected


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 4)
  save(checkpoints, 5)
  checkpoints.close()
  (folder / "save_1" / "notes" / "metadata").write_text("{")
  with pytest.raises(ValueError, match="save_1 is damaged.*remove it"):
    checkpoint.Checkpoints(folder).newest(make_state())
  shutil.rmtree(folder / "save_1")
  assert checkpoint.Checkpoints(folder).newest(make_state()).step == 4


def test_another_config_is_refused_naming_the_fields(folder):
  save(checkpoint.Checkpoints(folder, config=CONFIG), 1)
  other = {"model": {"name": "sage", "hidden": 32}, "seed": 0, "slate": 8}
  with pytest.raises(ValueError) as error:
    checkpoint.Checkpoints(folder, config=other).newest(make_state())
  message = str(error.value)
  assert "model.hidden is 64 there and 32 here" in message
  assert "slate is absent there and 8 here" in message
  assert "model.name" not in message and "seed" not in message and "\n" not in message


def test_a_checkpoint_saved_beside_other_files_is_refused_naming_the_file(folder):
  files = {"features.json": "a", "more/features.json": "b"}
  save(checkpoint.Checkpoints(folder, digests=files), 1)
  other = checkpoint.Checkpoints(folder, digests=files | {"more/features.json": "c"})
  with pytest.raises(ValueError, match="more/features"):
    other.newest(make_state())
  with pytest.raises(ValueError, match="more/features"):
    other.check(resume=True)
  for known in (files, {}, {"features.json": "a", "new": "d"}):  # files of both are compared
    found = checkpoint.Checkpoints(folder, digests=known)
    assert found.newest(make_state()).step == 1


def test_another_shape_is_refused_naming_the_array(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 1)
  with pytest.raises(ValueError, match="kernel"):
    checkpoints.newest(make_state(width=5))


FULL_DISK = """
import resource, sys
import numpy as np
from tpugraphs_jax.train import checkpoint
checkpoints = checkpoint.Checkpoints(sys.argv[1])
save = lambda step, size: checkpoints.save(
    step, {"a": np.random.default_rng(step).normal(size=size)}, data={}, progress={})
save(1, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes per file
save(2, 100_000)
"""


def test_a_full_disk_loses_no_earlier_checkpoint(folder):
  # Its own process: the limit holds for everything a process writes.
  run = commands.run(commands.Run(["-c", FULL_DISK, folder]), home=folder.parent)
  assert run.code == 1
  assert "step 2 not written" in run.err and "--resume" in run.err
  assert "never retrieved" not in run.err
  checkpoints = checkpoint.Checkpoints(folder)
  template = {"a": np.zeros(10)}
  saved = checkpoints.newest(template)
  assert saved.step == 1
  assert_same_trees(saved.state, {"a": np.random.default_rng(1).normal(size=10)})


def test_superseded_checkpoints_of_a_killed_run_are_removed_on_resume(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 1)
  save(checkpoints, 2)
  shutil.copytree(folder / "save_0", folder.parent / "superseded")
  save(checkpoints, 3)
  checkpoints.close()
  shutil.copytree(folder.parent / "superseded", folder / "save_0")
  (folder / "superseded" / "save_7").mkdir(parents=True)
  checkpoint.Checkpoints(folder, read_only=True).close()
  assert len(list(folder.iterdir())) == 4  # a reader leaves it alone
  checkpoints = checkpoint.Checkpoints(folder)
  assert sorted(path.name for path in folder.iterdir()) == ["save_1", "save_2"]
  assert checkpoints.newest(make_state()).step == 3


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/superseded", "checkpoints/save_0"])
def test_no_checkpoint_is_written_or_removed_through_a_link(tmp_path, link):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "elsewhere" / "precious").write_text("kept")
  (tmp_path / "sent" / link).parent.mkdir(parents=True)
  (tmp_path / "sent" / link).symlink_to(tmp_path / "elsewhere")
  with pytest.raises(ValueError, match="a link to"):
    checkpoint.Checkpoints(tmp_path / "sent" / "checkpoints", config=CONFIG)
  assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["precious"]


_RESTORE = """
import sys
import numpy as np
from tpugraphs_jax.train import checkpoint
state = {f"array_{n}": np.full((100, 100), n, np.float32) for n in range(20)}
checkpoints = checkpoint.Checkpoints(sys.argv[1])
try:
  checkpoints.newest(state)
except ValueError as error:
  print("refused", "\\n" in str(error))
"""


def test_a_damaged_array_is_a_line_without_tracebacks_of_other_threads(folder):
  state = {f"array_{n}": np.full((100, 100), n, np.float32) for n in range(20)}
  checkpoints = checkpoint.Checkpoints(folder)
  checkpoints.save(1, state, data=None, progress={})
  checkpoints.close()
  for path in folder.rglob("d/*"):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(255 ^ byte for byte in content[len(content) // 2 :])
    path.write_bytes(content)
  ended = commands.run(commands.Run(["-c", _RESTORE, folder]), home=folder.parent)
  assert ended.out == "refused False\n" and "Traceback" not in ended.err
