"""Checkpoints come back bit for bit, and an earlier one outlives a failed save."""

import functools
import logging
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.train import checkpoint, state as state_lib

CONFIG = {"model": {"name": "sage", "hidden": 64}, "seed": 0}


@functools.cache
def make_state(step=0, width=3):
  optimizer = state_lib.create_optimizer(
      total_steps=10, accumulation_steps=2, clip_norm=1.0, average_decay=0.9
  )
  rng = np.random.default_rng(step)
  params = {
      "kernel": jnp.asarray(rng.normal(size=(2, width)), jnp.float32),
      "scalar": jnp.asarray(rng.normal(), jnp.float32),
  }
  table = {"values": rng.normal(size=(5, 2)).astype(np.float32), "seen": np.ones(5, bool)}
  state = state_lib.TrainState.create(params, optimizer).replace(extra=table)
  state = state.apply_gradients(jax.tree.map(jnp.ones_like, params), optimizer)
  return jax.tree.map(np.asarray, state.replace(step=np.int32(step)))


def save(checkpoints, step, value=None):
  checkpoints.save(
      step,
      make_state(step),
      data={"next_index": step},
      progress={"best_value": 0.1 + 0.2, "none": None},
      value=value,
  )


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)

  def check(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes()

  jax.tree.map(check, found, expected)


def best_of(checkpoints):
  """The step of the best checkpoint, or of the newest where none was evaluated."""
  return checkpoints.best_params().step


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "checkpoints"


def test_newest_comes_back_bit_for_bit(folder):
  first = checkpoint.Checkpoints(folder, config=CONFIG)
  save(first, 7, value=0.5)
  first.close()
  second = checkpoint.Checkpoints(folder, config=CONFIG)
  saved = second.newest(make_state(0))
  assert_same(saved.state, make_state(7))
  assert saved.step == 7 and saved.data == {"next_index": 7}
  assert saved.progress == {"best_value": 0.1 + 0.2, "none": None}


def test_an_empty_folder_has_neither_newest_nor_best(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  assert checkpoints.newest(make_state()) is None
  assert checkpoints.best_params() is None


@pytest.mark.parametrize("value", [None, float("nan")])
def test_without_evaluation_the_newest_is_the_best(folder, value):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 1, value)
  save(checkpoints, 2, value)
  assert checkpoints.newest(make_state()).step == best_of(checkpoints) == 2


def test_a_reader_changes_nothing_where_a_run_is_saving(folder):
  save(checkpoint.Checkpoints(folder, config=CONFIG), 1, 0.5)
  # Orbax' name of a checkpoint on its way.
  on_its_way = folder / "save_1.orbax-checkpoint-tmp"
  on_its_way.mkdir()
  before = sorted(path.name for path in folder.rglob("*"))
  reader = checkpoint.Checkpoints(folder, config=CONFIG, read_only=True)
  assert reader.newest_step() == best_of(reader) == 1
  reader.check_config()
  reader.close()
  assert sorted(path.name for path in folder.rglob("*")) == before


def test_a_reader_of_a_missing_folder_finds_nothing_and_makes_nothing(folder):
  reader = checkpoint.Checkpoints(folder, read_only=True)
  assert reader.newest_step() is reader.best_params() is reader.newest(make_state()) is None
  reader.check_config()
  reader.close()
  assert not folder.exists()


@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [0.5, None, 0.9, None, 0.8],
        [0.9, 0.1, 0.2],
        [None, 0.4, None, None],
        [0.5, 0.5, 0.5],
        [0.5, float("nan"), 0.4],
        [-1.0, -2.0, None],
    ],
)
def test_newest_and_best_are_kept_and_nothing_else(folder, values, reopen):
  checkpoints = checkpoint.Checkpoints(folder)
  for step, value in enumerate(values):
    save(checkpoints, step, value)
    if reopen:
      checkpoints.close()
      checkpoints = checkpoint.Checkpoints(folder)
    seen = {s: v for s, v in enumerate(values[: step + 1]) if v is not None and v == v}
    best = max(seen, key=lambda s: (seen[s], -s)) if seen else step
    assert checkpoints.newest(make_state()).step == step and best_of(checkpoints) == best
    kept = {path.name for path in folder.iterdir()}
    assert kept >= {f"save_{step}", f"save_{best}"} and len(kept) <= 2


def test_a_step_saved_again_once_evaluated_becomes_the_best(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 3, 0.5)
  save(checkpoints, 4)
  save(checkpoints, 4, 0.6)
  assert best_of(checkpoints) == checkpoints.newest_step() == 4


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
  files = {"features.json": "a", "also/tile_xla/features.json": "b"}
  save(checkpoint.Checkpoints(folder, files=files), 1)
  other = checkpoint.Checkpoints(folder, files=files | {"also/tile_xla/features.json": "c"})
  with pytest.raises(ValueError, match="^also/tile_xla/features.json is of another run: .*save_0"):
    other.newest(make_state())
  with pytest.raises(ValueError, match="^also/tile_xla/features.json is of another run"):
    other.check_config()
  for known in (files, {}, {"features.json": "a", "new": "d"}):  # what both know is compared
    found = checkpoint.Checkpoints(folder, files=known)
    assert found.newest(make_state()).step == 1 and found.best_params().files == files


def test_tuples_and_numpy_numbers_in_a_config_equal_their_json_form(folder):
  save(checkpoint.Checkpoints(folder, config={"a": (1, 2), "b": np.int64(3)}), 1)
  same = checkpoint.Checkpoints(folder, config={"a": [1, 2], "b": 3})
  assert same.newest(make_state()).step == 1


def test_another_shape_is_refused_naming_the_array(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 1)
  with pytest.raises(ValueError, match=r"kernel.*float32\[2, 3\].*float32\[2, 5\]"):
    checkpoints.newest(make_state(width=5))


def test_another_structure_is_refused(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 1)
  with pytest.raises(ValueError, match="does not fit this model"):
    checkpoints.newest(make_state().replace(extra=()))


FULL_DISK = """
import resource, sys
import numpy as np
from tpugraphs_jax.train import checkpoint
checkpoints = checkpoint.Checkpoints(sys.argv[1])
save = lambda step, size: checkpoints.save(
    step, {"a": np.random.default_rng(step).normal(size=size)}, data={}, progress={},
    value=float(step))
save(1, 10)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # bytes per file
save(2, 100_000)
"""


def test_a_full_disk_loses_no_earlier_checkpoint(folder):
  # Its own process: the limit holds for everything a process writes.
  run = subprocess.run(
      [sys.executable, "-c", FULL_DISK, folder], capture_output=True, text=True
  )
  assert run.returncode == 1
  assert "step 2 not written" in run.stderr and "--resume" in run.stderr
  checkpoints = checkpoint.Checkpoints(folder)
  template = {"a": np.zeros(10)}
  saved = checkpoints.newest(template)
  assert saved.step == 1
  assert_same(saved.state, {"a": np.random.default_rng(1).normal(size=10)})


def test_a_half_written_checkpoint_is_ignored_and_removed(folder):
  save(checkpoint.Checkpoints(folder), 1)
  (folder / "save_0").rename(folder / "save_1.orbax-checkpoint-tmp")
  save(checkpoint.Checkpoints(folder), 1)
  checkpoints = checkpoint.Checkpoints(folder)
  assert checkpoints.newest(make_state()).step == 1
  assert [path.name for path in folder.iterdir()] == ["save_0"]


def test_saving_logs_nothing(folder, caplog):
  with caplog.at_level(logging.INFO, logger="absl"):
    checkpoints = checkpoint.Checkpoints(folder)
    save(checkpoints, 1)
    checkpoints.newest(make_state())
  assert not [r for r in caplog.records if "orbax" in r.pathname]


def test_what_a_killed_run_had_not_yet_removed_goes_when_it_is_resumed(folder):
  checkpoints = checkpoint.Checkpoints(folder)
  save(checkpoints, 1, 0.9)
  save(checkpoints, 2, 0.1)
  shutil.copytree(folder / "save_1", folder.parent / "superseded")
  save(checkpoints, 3, 0.2)
  checkpoints.close()
  shutil.copytree(folder.parent / "superseded", folder / "save_1")
  (folder / "superseded" / "save_7").mkdir(parents=True)
  checkpoint.Checkpoints(folder, read_only=True).close()
  assert len(list(folder.iterdir())) == 4  # a reader leaves it alone
  checkpoints = checkpoint.Checkpoints(folder)
  assert sorted(path.name for path in folder.iterdir()) == ["save_0", "save_2"]
  assert best_of(checkpoints) == 1 and checkpoints.newest_step() == 3


def damages(data):
  """A file's bytes, damaged in several ways."""
  middle = len(data) // 2
  flipped = bytearray(data)
  flipped[middle : middle + 1] = bytes([data[middle] ^ 1]) if data else b""
  return {"cut": data[:middle], "flipped": bytes(flipped)}


def read_all(folder):
  """What a checkpoint gives; or None, after one line that says what is wrong with it."""
  try:
    checkpoints = checkpoint.Checkpoints(folder, config=CONFIG, read_only=True)
    saved, best = checkpoints.newest(make_state()), checkpoints.best_params()
    checkpoints.close()
  except (ValueError, OSError) as error:
    assert str(folder) in str(error) and "\n" not in str(error)
    return None
  return None if saved is None else (saved, best)


# Orbax leaves callbacks behind where a read fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_damaged_file_gives_another_state(folder):
  checkpoints = checkpoint.Checkpoints(folder, config=CONFIG)
  save(checkpoints, 7, value=0.5)
  checkpoints.close()
  refused = 0
  for path in sorted(path for path in folder.rglob("*") if path.is_file()):
    whole = path.read_bytes()
    for damage in damages(whole).values():
      path.write_bytes(damage)
      found = read_all(folder)
      refused += found is None
      if found is not None:
        assert_same(found[0].state, make_state(7))
        assert (found[0].step, found[1].step, found[1].value) == (7, 7, 0.5)
    path.write_bytes(whole)
  assert refused >= 10 and read_all(folder) is not None


def test_a_run_with_averaged_weights_goes_on_as_if_never_stopped(folder):
  optimizer = state_lib.create_optimizer(
      total_steps=10, learning_rate=0.1, average_window=(0.3, 0.9))
  params = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)}
  grads = lambda step: {"kernel": jnp.sin(step + jnp.arange(6.0).reshape(2, 3))}

  def steps(state, numbers):
    for step in numbers:
      state = state.apply_gradients(grads(step), optimizer)
    return jax.tree.map(np.asarray, state)

  fresh = jax.tree.map(np.asarray, state_lib.TrainState.create(params, optimizer))
  checkpoints = checkpoint.Checkpoints(folder, config=CONFIG)
  checkpoints.save(5, steps(fresh, range(5)), data={}, progress={}, value=None)
  checkpoints.close()
  saved = checkpoint.Checkpoints(folder, config=CONFIG).newest(fresh).state
  found, expected = steps(saved, range(5, 10)), steps(fresh, range(10))
  assert_same(found, expected)
  assert (expected.eval_params["kernel"] != expected.params["kernel"]).any()


def test_writes_that_fail_after_the_first_one_print_nothing(folder, monkeypatch, caplog):
  unraisable = []
  monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
  for name in "ab":
    checkpoint.Checkpoints(folder / name).close()
  for message in ("Event loop is closed", "another"):
    sys.unraisablehook(types.SimpleNamespace(
        exc_type=RuntimeError, exc_value=RuntimeError(message)))
  assert [str(told.exc_value) for told in unraisable] == ["another"]
  # Tasks that nobody has waited for any more.
  coro = "<Task coro=<_open_and_write() done, defined at /lib/orbax/checkpoint/_src/x.py:1>>"
  for text in (f"Task exception was never retrieved\nfuture: {coro}", "of another library"):
    logging.getLogger("asyncio").error(text)
  logging.getLogger("absl").warning("%s cannot be written", "/data/orbax/run/metrics.jsonl")
  assert caplog.messages == [
      "of another library", "/data/orbax/run/metrics.jsonl cannot be written"]
