"""Metrics are written once per step, complete and readable; a failing output stops no run."""

import io
import json
import math
import os
import sys
import time

import jax
import numpy as np
import pytest
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, plugin_hparams_pb2

from tests.support import toy
from tests.support.run_folders import metrics
from tpugraphs_jax.infra import console, machine
from tpugraphs_jax.train.log import Log, write_manifest

FULL = "/dev/full"  # every write ends with: no space left on device


def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
  log = Log(tmp_path, total_steps=10)
  log.write(1, {"x": 1.0, "none": math.nan, "infinite": math.inf})
  assert metrics(tmp_path) == [{"step": 1, "x": 1.0, "none": None, "infinite": None}]
  log.close()


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nwhat\n{"step": 2}\n')
  with pytest.raises(ValueError, match="line 2"):
    Log(tmp_path, total_steps=10)


def events_of(workdir):
  """TensorBoard's file format: length (8), checksum (4), event, checksum (4)."""
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      for value in event.summary.value:
        yield event.step, value.tag, value
      data = data[16 + size :]


def test_measurements_are_in_tensorboard_and_not_in_the_metrics_file(tmp_path, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  monkeypatch.setattr("tpugraphs_jax.train.log.peak_memory", lambda: ("device", 3 * 2**20))
  log = Log(tmp_path, total_steps=100)
  for _ in range(4):
    with log.waiting():
      now[0] += 0.25
    now[0] += 1.0
  log.measure(4)
  log.measure(4)  # no step since: nothing to show
  log.write(4, {"x": 1.0})
  log.close()
  found = {tag: value.simple_value for _, tag, value in events_of(tmp_path)}
  assert found == {
    "measured/step_seconds": 1.25,
    "measured/data_wait_seconds": 0.25,
    "measured/peak_memory_of_device_mib": 3.0,
    "x": 1.0,
  }
  assert metrics(tmp_path) == [{"step": 4, "x": 1.0}]


def test_a_progress_line_comes_every_ten_seconds_with_the_rate_since_the_last(
  tmp_path, monkeypatch, capsys
):
  now = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  log = Log(tmp_path, total_steps=100)
  for step in range(1, 7):
    now[0] += 4.0
    log.say_progress(step, lambda: "loss 1")
    log.measure(step)  # a row of figures comes more often and does not touch the rate
  log.restart_clock(6)  # after an evaluation
  log.say_progress(6, lambda: "tau 0.5", is_due=True)
  log.close()
  lines = [line[20:] for line in capsys.readouterr().out.splitlines()]
  assert lines == [
    "step 3/100  loss 1  0.25 steps/s",
    "step 6/100  loss 1  0.25 steps/s",
    "step 6/100  tau 0.5",
  ]


def test_tensorboard_has_the_config_as_text_and_as_hyperparameters(tmp_path):
  log = Log(tmp_path, total_steps=100)
  config = {"task": "tile", "model": {"dims": (3, 4), "dropout": None}, "rate": 0.5, "on": True}
  log.events.describe(config, metric="valid_sample/opa", parameters=12)
  log.close()
  found = {tag: value for _, tag, value in events_of(tmp_path)}
  assert found["parameters"].simple_value == 12
  (text,) = found["config/text_summary"].tensor.string_val
  assert "|model.dims|(3, 4)|" in text.decode() and "|rate|0.5|" in text.decode()
  read = plugin_hparams_pb2.HParamsPluginData.FromString
  start, experiment = (
    read(found[f"_hparams_/{name}"].metadata.plugin_data.content)
    for name in ("session_start_info", "experiment")
  )
  hparams = start.session_start_info.hparams
  assert hparams["rate"].number_value == 0.5 and hparams["on"].bool_value
  assert hparams["model.dims"].string_value == "[3, 4]" and hparams["parameters"].number_value == 12
  (metric,) = experiment.experiment.metric_infos
  assert metric.name.tag == "valid_sample/opa"


def test_histograms_hold_the_numbers_that_are_finite(tmp_path):
  log = Log(tmp_path, total_steps=100)
  values = np.array([0.5, math.nan, -1.0, 0.75, math.inf])
  log.events.histograms(7, {"tau": values, "nothing": np.array([math.nan])})
  log.close()
  ((step, tag, value),) = events_of(tmp_path)
  assert (step, tag) == (7, "tau")
  assert (value.histo.num, value.histo.min, value.histo.max) == (3, -1.0, 0.75)
  assert value.histo.sum == pytest.approx(0.25) and sum(value.histo.bucket) == 3


@pytest.mark.parametrize(
  "values",
  [[0.5], [0.5] * 3, [0.5, np.nextafter(0.5, 1)], [1e-300, 2e-300], [1e15, 1e15 + 1], [0.0, -0.0]],
)
def test_histograms_of_nearly_equal_numbers_stop_nothing(values, tmp_path, caplog):
  log = Log(tmp_path, total_steps=100)
  log.events.histograms(1, {"tau": np.array(values)})
  log.write(2, {"x": 1.0})
  log.close()
  (_, _, first), (_, tag, _) = events_of(tmp_path)
  assert sum(first.histo.bucket) == len(values) == first.histo.num
  assert tag == "x" and not warnings_of(caplog, "without TensorBoard")


def test_other_processes_write_and_print_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(machine, "is_primary", lambda: False)
  write_manifest(tmp_path, {})
  log = Log(tmp_path, total_steps=100)
  log.write(1, {"train/loss": 0.5})
  log.say_progress(25, lambda: "loss 0.5")
  log.events.describe({}, metric="x", parameters=1)
  log.events.histograms(25, {"tau": np.ones(2)})
  log.measure(25)
  log.close()
  assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


@pytest.mark.parametrize(
  "argv, command",
  [
    (["/bin/tpugraphs-tile", "--workdir=my run"], "tpugraphs-tile '--workdir=my run'"),
    (["run_layout.py", "--resume"], "run_layout.py --resume"),
    (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], ""),
    ([""], ""),
  ],
)
def test_a_manifest_has_the_command_of_a_run(argv, command, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "argv", argv)
  write_manifest(tmp_path, {})
  assert json.loads((tmp_path / "config.json").read_text())["command"] == command


def warnings_of(caplog, text):
  return [message for message in caplog.messages if text in message]


def train(workdir, **changes):
  return toy.train(workdir, log_every_steps=1, **changes)


@pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full here")
def test_a_full_disk_under_tensorboard_costs_one_warning(tmp_path, monkeypatch, caplog):
  with open(FULL, "wb", buffering=0) as disk:
    monkeypatch.setattr(record_writer, "open_file", lambda path: disk)
    result = train(tmp_path)
  assert result.step == toy.STEPS
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == toy.STEPS
  assert len(warnings_of(caplog, "goes on without TensorBoard")) == 1


def test_a_tensorboard_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
  (tmp_path / "tensorboard").write_text("in the way")
  assert train(tmp_path).step == toy.STEPS
  assert len(warnings_of(caplog, "goes on without TensorBoard")) == 1


class Flaky(io.FileIO):
  """A file on a disk with `room` bytes left, which a test may change."""

  room = 1000

  def write(self, data):
    if not self.room:
      raise OSError(28, "No space left on device")
    count = super().write(data[: self.room])
    self.room -= count
    return count


def test_lines_that_found_no_room_are_written_later_in_order(tmp_path, caplog):
  log = Log(tmp_path, total_steps=10)
  disk = Flaky(tmp_path / "metrics.jsonl", "a")
  log._lines.close()
  log._lines = io.BufferedWriter(disk)
  log.write(1, {})
  disk.room = 9
  for step in (2, 3, 4):
    log.write(step, {})
  assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": '
  disk.room = 1000
  log.write(5, {})
  assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5]
  disk.room = 0
  log.write(6, {})
  log.close()
  assert len(warnings_of(caplog, "cannot be written (No space left")) == 1
  assert len(warnings_of(caplog, "misses the last lines")) == 1


def test_a_reader_of_the_output_that_is_gone_does_not_end_a_run(tmp_path, monkeypatch, caplog):
  class Gone(io.StringIO):
    def write(self, text):
      raise BrokenPipeError(32, "Broken pipe")

  monkeypatch.setattr(sys, "stdout", Gone())
  console.say("of a run")
  assert train(tmp_path).step == toy.STEPS
  sys.stdout.close()  # the null device by now
  assert len(warnings_of(caplog, "standard output cannot be written")) == 1


@pytest.mark.parametrize("broken", ["start_trace", "stop_trace"])
def test_a_profile_that_cannot_be_written_does_not_end_a_run(broken, tmp_path, monkeypatch, caplog):
  def fail(*args):
    raise OSError(28, "No space left on device")

  for name in ("start_trace", "stop_trace"):
    monkeypatch.setattr(jax.profiler, name, fail if name == broken else lambda *args: None)
  assert train(tmp_path, profiled_steps=(2, 4)).step == toy.STEPS
  assert len(warnings_of(caplog, "no profile")) == 1


def test_the_log_is_not_written_through_links(tmp_path, caplog):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "sent").mkdir()
  (tmp_path / "sent" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere" / "new.jsonl")
  with pytest.raises(ValueError, match="a link to"):
    Log(tmp_path / "sent", total_steps=10)
  (tmp_path / "sent" / "metrics.jsonl").unlink()
  (tmp_path / "sent" / "tensorboard").symlink_to(tmp_path / "elsewhere")
  log = Log(tmp_path / "sent", total_steps=10)
  log.write(1, {"loss": 1.0})
  log.close()
  assert "a link to" in caplog.text
  assert not list((tmp_path / "elsewhere").iterdir())
