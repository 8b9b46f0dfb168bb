"""What merely reports never stops, slows or loses a run."""

import io
import os
import sys
import threading
import time

import jax
import numpy as np
import pytest
import toy
from tensorboardX import event_file_writer

from tpugraphs_jax import console
from tpugraphs_jax.train import loop, outlets, report as report_lib

FULL = "/dev/full"  # every write ends with: no space left on device


def warnings_of(caplog, text):
  return [message for message in caplog.messages if text in message]


def train(workdir, **changes):
  options = dict(
      train_step=toy.TRAIN_STEP, batches=toy.make_batches(), evaluate=toy.evaluate,
      workdir=workdir, total_epochs=toy.EPOCHS, steps_per_epoch=toy.STEPS_PER_EPOCH,
      log_every_steps=1)
  return loop.train(toy.make_state(), **(options | changes))


def to_full_disk(monkeypatch):
  """Every event file lies on a disk that is full."""
  from tensorboardX import record_writer
  disk = open(FULL, "wb", buffering=0)
  monkeypatch.setattr(record_writer, "open_file", lambda path: disk)
  return disk


def blocked_disk(monkeypatch):
  """Event files on a disk that never answers; call what comes back to set it free."""
  free = threading.Event()
  monkeypatch.setattr(
      event_file_writer.EventsWriter, "write_event", lambda self, event: free.wait())
  return free.set


@pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full here")
def test_a_full_disk_under_tensorboard_costs_one_warning(tmp_path, monkeypatch, caplog):
  with to_full_disk(monkeypatch):
    result = train(tmp_path)
  assert result.step == toy.STEPS
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == toy.STEPS
  assert len(warnings_of(caplog, "goes on without TensorBoard")) == 1


def test_a_tensorboard_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
  (tmp_path / "tensorboard").write_text("in the way")
  assert train(tmp_path).step == toy.STEPS
  assert len(warnings_of(caplog, "goes on without TensorBoard")) == 1


def test_a_disk_that_never_answers_does_not_hold_up_a_run(tmp_path, monkeypatch, caplog):
  free = blocked_disk(monkeypatch)
  monkeypatch.setattr(outlets, "_WAITING_ROWS", 5)
  monkeypatch.setattr(outlets, "_CLOSE_SECONDS", 0.1)
  report, started = report_lib.Report(tmp_path, total_steps=100), time.monotonic()
  for step in range(100):
    report.write(step, {"x": 1.0})
  report.close()
  assert time.monotonic() - started < 5
  free()
  assert len(warnings_of(caplog, "its disk is too slow")) == 1
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100


class Flaky(io.FileIO):
  """A file on a disk with so much room; more can be made."""

  room = 1000

  def write(self, data):
    if not self.room:
      raise OSError(28, "No space left on device")
    count = super().write(data[: self.room])
    self.room -= count
    return count


def test_lines_that_found_no_room_are_written_later_in_order(tmp_path, caplog):
  path = tmp_path / "lines"
  lines = outlets.Lines(path)
  disk = lines._file = Flaky(path, "a")
  lines.write("first")
  disk.room = 9
  for word in ("second", "third", "fourth"):
    lines.write(word)
  assert path.read_text() == "first\nsecond\nth"
  disk.room = 1000
  lines.write("fifth")
  lines.close()
  assert path.read_text().split() == ["first", "second", "third", "fourth", "fifth"]
  assert len(warnings_of(caplog, "No space left on device")) == 1


def test_lines_that_never_found_room_are_counted(tmp_path, caplog):
  lines = outlets.Lines(tmp_path / "missing" / "lines")
  lines.write("a")
  lines.write("b")
  lines.close()
  assert warnings_of(caplog, "misses 2 lines")


def test_a_reader_of_the_output_that_is_gone_does_not_end_a_run(tmp_path, monkeypatch, caplog):
  class Gone(io.StringIO):
    def write(self, text):
      raise BrokenPipeError(32, "Broken pipe")

  monkeypatch.setattr(sys, "stdout", Gone())
  console.say("of a job")
  assert train(tmp_path).step == toy.STEPS
  assert len(warnings_of(caplog, "standard output cannot be written")) == 1


@pytest.mark.parametrize("broken", ["start_trace", "stop_trace"])
def test_a_profile_that_cannot_be_written_does_not_end_a_run(
    broken, tmp_path, monkeypatch, caplog):
  def fail(*args):
    raise OSError(28, "No space left on device")

  for name in ("start_trace", "stop_trace"):
    monkeypatch.setattr(jax.profiler, name, fail if name == broken else lambda *args: None)
  assert train(tmp_path, profile_steps="2:4").step == toy.STEPS
  assert len(warnings_of(caplog, "no profile")) == 1


def test_what_is_shown_is_made_in_the_thread_of_its_own(tmp_path, monkeypatch, caplog):
  made = []

  def histogram(*args, **options):
    made.append(threading.current_thread().name)
    raise ValueError("no such histogram")

  monkeypatch.setattr(outlets.summary, "histogram", histogram)
  result = train(tmp_path, evaluate=lambda params: {"opa": 0.5, "opa_by_graph": np.ones(3)})
  assert result.step == toy.STEPS and set(made) == {"TensorBoard"}
  assert len(warnings_of(caplog, "goes on without TensorBoard")) == 1
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == toy.STEPS


def test_a_config_of_any_types_can_be_shown(tmp_path, caplog):
  about = {"none": None, "nested": {"tuple": (1, "a"), "empty": (), "path": "a|b"}, "flag": False}
  assert train(tmp_path, about=about).step == toy.STEPS
  assert not warnings_of(caplog, "TensorBoard")
