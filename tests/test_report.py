"""Metrics are there once per step, complete and readable after any interruption."""

import json
import math
import re

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tpugraphs_jax.train import report as report_lib


def lines_of(workdir):
  return [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]


def write_steps(workdir, steps, *, first_step=0):
  report = report_lib.Report(workdir, total_steps=100, first_step=first_step)
  for step in steps:
    report.write(step, {"train/loss": step / 3, "note": np.float32(0.5)})
  report.close()


def test_each_line_is_a_step_with_exact_numbers(tmp_path):
  write_steps(tmp_path, [1, 2])
  assert lines_of(tmp_path) == [
      {"step": step, "train/loss": step / 3, "note": 0.5} for step in (1, 2)
  ]


def test_lines_can_be_read_while_the_run_goes_on(tmp_path):
  report = report_lib.Report(tmp_path, total_steps=10)
  report.write(1, {"x": 1.0})
  assert lines_of(tmp_path) == [{"step": 1, "x": 1.0}]
  report.close()


def test_numbers_that_are_not_finite_become_null(tmp_path):
  report = report_lib.Report(tmp_path, total_steps=10)
  report.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
  report.close()
  assert lines_of(tmp_path) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_resuming_drops_the_later_steps(tmp_path):
  write_steps(tmp_path, [10, 20, 30])
  write_steps(tmp_path, [21, 30], first_step=20)
  assert [line["step"] for line in lines_of(tmp_path)] == [10, 20, 21, 30]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
  write_steps(tmp_path, [1, 2])
  path = tmp_path / "metrics.jsonl"
  path.write_text(path.read_text()[:-9])
  write_steps(tmp_path, [2], first_step=1)
  assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nwhat\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is not a JSON object"):
    report_lib.Report(tmp_path, total_steps=10)


def events_of(workdir):
  """TensorBoard's file format: length (8), checksum (4), event, checksum (4)."""
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      for value in event.summary.value:
        yield event.step, value.tag, value.simple_value
      data = data[16 + size :]


def test_tensorboard_has_the_same_scalars(tmp_path):
  write_steps(tmp_path, [3])
  assert sorted(events_of(tmp_path)) == [
      (3, "note", 0.5),
      (3, "train/loss", 1.0),
  ]


def test_progress_says_where_the_run_is(tmp_path, capsys):
  report = report_lib.Report(tmp_path, total_steps=100)
  report.progress(25, "loss 0.5", left="0:01:00 left")
  report.close()
  (line,) = capsys.readouterr().out.splitlines()
  assert re.search(r":\d\d step 25/100  loss 0.5  \S+ steps/s  0:01:00 left$", line)


def test_progress_without_a_step_since_has_no_rate(tmp_path, capsys):
  report = report_lib.Report(tmp_path, total_steps=100, first_step=25)
  report.progress(25, "loss 0.5")
  report.close()
  assert capsys.readouterr().out.endswith(" step 25/100  loss 0.5\n")


def test_other_processes_write_and_print_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(report_lib.parallel, "is_primary", lambda: False)
  write_steps(tmp_path, [1, 2])
  report_lib.write_manifest(tmp_path, {})
  report = report_lib.Report(tmp_path, total_steps=100)
  report.progress(25, "loss 0.5")
  report.close()
  assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_manifest_says_what_ran_where(tmp_path):
  config = {"model": {"hidden": 64}}
  report_lib.write_manifest(tmp_path / "new", config)
  manifest = json.loads((tmp_path / "new" / "config.json").read_text())
  assert manifest["config"] == config
  assert manifest["versions"]["numpy"] == np.__version__
  assert manifest["devices"]["count"] == 4 and manifest["devices"]["platform"] == "cpu"
  assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.json"]


def test_peak_memory_of_a_process_counts_what_was_freed():
  what, before = report_lib.peak_memory()
  assert what == "process"
  block = np.ones(before + 64 * 2**20, np.uint8)
  size = block.nbytes
  del block
  assert report_lib.peak_memory()[1] >= size


@pytest.mark.parametrize("steps", ["", "0:1"])
def test_profile_accepts_nothing_and_a_range(tmp_path, steps):
  profile = report_lib.Profile(steps, tmp_path)
  profile.stop()
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", ["10", "5:5", "6:2", "-1:2", "a:b", "1:2:3"])
def test_profile_refuses_anything_else(tmp_path, steps):
  with pytest.raises(ValueError, match="profile_steps is .*'10:20'"):
    report_lib.Profile(steps, tmp_path)
