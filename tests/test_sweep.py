"""A sweep does missing runs, keeps finished ones, and has a row for every run."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys

import pytest

from tests.support import commands
from tests.support.run_folders import write_run
from tpugraphs_jax import sweep
from tpugraphs_jax.infra import tasks
from tpugraphs_jax.run import configs


def finish(folder, *, ended="last epoch (3)", validation=True, **metrics):
  """Writes the summary of a finished run."""
  folder.mkdir(parents=True, exist_ok=True)
  found = {"training": {"ended": ended, "step": 12, "seconds": 2.5}}
  if validation:
    found["validation"] = {"metrics": {"opa_pooled": 0.75, **metrics}}
  (folder / "summary.json").write_text(json.dumps(found))


def a_run(out, command=("true",)):
  return sweep.SweepRun("base/seed_0", str(out), tuple(command), (), 0)


@pytest.mark.parametrize(
  "texts, expected",
  [
    ([], {}),
    (["optimizer.learning_rate:1e-3,3e-3"], {"optimizer.learning_rate": ["1e-3", "3e-3"]}),
    (["a.b:x", "a.c:1,2"], {"a.b": ["x"], "a.c": ["1", "2"]}),
    (
      ["model.pooling:('mean',),('max','mean')"],
      {"model.pooling": ["('mean',)", "('max','mean')"]},
    ),
    (
      ["loss.losses:'ListMLELoss:1,MSE:0.02',MSE:1"],
      {"loss.losses": ["'ListMLELoss:1,MSE:0.02'", "MSE:1"]},
    ),
  ],
)
def test_a_grid_is_fields_with_values(texts, expected):
  assert sweep.grid_of(texts) == expected


def test_every_point_is_run_with_every_seed():
  grid = {"optimizer.learning_rate": ["1e-3", "3e-3"], "model.hidden_dim": ["8"]}
  found = sweep.runs_of({"tile.py": ["run"]}, "out", grid, range(2))
  assert [run.name for run in found] == [
    f"learning_rate={rate},hidden_dim=8/seed_{seed}" for rate in ("1e-3", "3e-3") for seed in (0, 1)
  ]
  assert found[1].command == (
    "run",
    "--config.optimizer.learning_rate=1e-3",
    "--config.model.hidden_dim=8",
    "--config.seed=1",
  )
  assert [run.seed for run in found] == [0, 1, 0, 1]


def test_values_that_make_one_folder_are_refused():
  with pytest.raises(ValueError, match="name"):
    sweep.runs_of({"tile.py": ["run"]}, "out", {"x": ["(1)", "[1]"]}, [0])


def test_every_config_is_run_at_every_point_in_a_folder_of_its_name():
  command_of = {"layout.py:xla-random,full": ["a"], "my/layout.py:gst_ed": ["b"]}
  found = sweep.runs_of(command_of, "out", {"x": ["1"]}, [0])
  assert [run.name for run in found] == ["xla-random,full,x=1/seed_0", "gst_ed,x=1/seed_0"]
  assert [run.command[0] for run in found] == ["a", "b"]
  assert found[1].point == (("config", "my/layout.py:gst_ed"), ("x", "1"))
  same = sweep.runs_of({"a.py:ci": ["a"], "b.py:ci": ["b"]}, "out", {}, [0])
  assert [run.name for run in same] == ["a.py_ci/seed_0", "b.py_ci/seed_0"]


@pytest.mark.parametrize(
  "options, expected",
  [
    ({}, True),
    (dict(ended="early stopping: opa did not improve in 3 epochs"), True),
    (dict(ended="asked to stop (SIGTERM)"), False),
    (dict(validation=False), False),
  ],
)
def test_a_run_is_done_when_it_ended_by_itself_and_was_judged(tmp_path, options, expected):
  run = a_run(tmp_path)
  assert not run.is_done
  finish(tmp_path / run.name, **options)
  assert run.is_done == expected


def test_a_run_on_folds_is_done_when_its_test_fold_was_judged(tmp_path):
  run = a_run(tmp_path)
  finish(tmp_path / run.name)
  path = tmp_path / run.name / "summary.json"
  found = json.loads(path.read_text()) | {"folds": 3}
  path.write_text(json.dumps(found))
  assert not run.is_done
  path.write_text(json.dumps(found | {"test": {"metrics": {"opa_pooled": 0.5}}}))
  assert run.is_done and sweep.row_of(run)["opa_pooled"] == 0.5


SAY = "import sys; print(sys.argv[1:]); sys.exit('error: {0}' if '{0}' else 0)"


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_run_that_was_begun_is_resumed(tmp_path, is_begun, capsys):
  run = a_run(tmp_path, command=[sys.executable, "-c", SAY.format("")])
  if is_begun:
    (tmp_path / run.name / "checkpoints").mkdir(parents=True)
  sweep.do(run)
  log = (tmp_path / run.name / "log.txt").read_text()
  assert f"--workdir={tmp_path / run.name}" in log and ("--resume" in log) == is_begun
  assert ("goes on" if is_begun else "begins") in capsys.readouterr().out


_LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@pytest.mark.parametrize("chosen", ["", "/mine"])
def test_runs_keep_every_program_in_the_cache_of_the_user(tmp_path, monkeypatch, chosen):
  """The folder of a sweep may come from somebody else: no program from it is executed."""
  monkeypatch.delenv(_LEAST, raising=False)
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", chosen)
  run = a_run(tmp_path, ["sh", "-c", f"echo ${_LEAST} $JAX_COMPILATION_CACHE_DIR"])
  sweep.do(run)
  assert (run.folder / "log.txt").read_text().splitlines()[-1] == f"0 {chosen}".strip()
  assert {path.name for path in tmp_path.rglob("*")} == {"base", "seed_0", "log.txt"}


@pytest.mark.parametrize("link", ["base", "base/seed_0", "base/seed_0/log.txt"])
def test_a_run_writes_through_no_link_in_the_folder_of_its_sweep(tmp_path, link):
  target, out = tmp_path / "target", tmp_path / "out"
  (out / link).parent.mkdir(parents=True)
  (out / link).symlink_to(target)
  if not link.endswith(".txt"):
    target.mkdir()
  with pytest.raises(ValueError, match="a link to"):
    sweep.do(a_run(out))
  assert not target.is_file() and not list(tmp_path.rglob("target/*"))


def test_the_log_of_a_run_grows_while_it_goes_and_keeps_what_earlier_processes_said(tmp_path):
  log, said = tmp_path / "base/seed_0/log.txt", "import pathlib; print('first', flush=True); "
  sweep.do(a_run(tmp_path, [sys.executable, "-c", said + "raise SystemExit('error: gone')"]))
  # The process itself reads the log, while it goes.
  wait = f"print(pathlib.Path({str(log)!r}).read_text().splitlines().count('first'))"
  again = a_run(tmp_path, [sys.executable, "-c", said + wait])
  sweep.do(again)
  lines = log.read_text().splitlines()
  assert [line[:4] for line in lines] == ["--- ", "firs", "erro", "--- ", "firs", "2"]
  assert sweep.row_of(again)["state"] == "2"  # of the last process


def test_a_run_that_fails_stops_no_other_and_says_why(tmp_path, capsys):
  failing = a_run(tmp_path, command=[sys.executable, "-c", SAY.format("no such field")])
  sweep.do(failing)
  assert "error: no such field" in capsys.readouterr().out
  assert sweep.row_of(failing)["state"] == "error: no such field"


def test_there_is_a_row_for_every_run(tmp_path):
  runs = sweep.runs_of(
    {"tile.py": ["run"]}, str(tmp_path), {"optimizer.learning_rate": ["1", "2"]}, [0]
  )
  finish(tmp_path / runs[0].name, kendaltau_mean=0.5)
  sweep._write_rows(runs, str(tmp_path))
  with (tmp_path / "runs.csv").open(newline="") as file:
    first, second = csv.DictReader(file)
  assert first == {
    "run": "learning_rate=1/seed_0",
    "optimizer.learning_rate": "1",
    "seed": "0",
    "state": "done",
    "step": "12",
    "seconds": "2.5",
    "opa_pooled": "0.75",
    "kendaltau_mean": "0.5",
  }
  assert second["state"] == "not begun" and second["opa_pooled"] == ""


def test_a_folder_of_another_sweep_is_refused(tmp_path):
  sweep._check_settings(str(tmp_path), {"config": "tile.py", "fields": []})
  sweep._check_settings(str(tmp_path), {"config": "tile.py", "fields": []})
  with pytest.raises(ValueError, match="layout.py"):
    sweep._check_settings(str(tmp_path), {"config": "layout.py", "fields": []})


ARGUMENTS = ["--config=tile.py:ci", "--out=OUT"]


@pytest.mark.parametrize(
  "more, complaint",
  [
    (["--grid=optimizer.rate:1"], "rate=1: the config has no field 'optimizer.rate'"),
    (["--config.optimizer.rate=1"], "base: the config has no field 'optimizer.rate'"),
    (["--grid=batch.graphs:2,-1"], "graphs=-1: --config.batch.graphs is -1, expected "),
    (["--grid=batch.graphs:2,x"], "graphs=x: flag --config.batch.graphs=x: invalid literal"),
    (["--grid=optimizer.learning_rat:1"], "did you mean optimizer.learning_rate? --print_config"),
    (["--grid=x"], "expected FIELD:VALUE"),
    (["--config=recommended"], "--config=recommended, expected FILE.py:VARIANT such as tile.py:"),
    (["--config=nope.py"], "there is no config file nope.py"),
    (["--out=gs://b/sweep"], "--out is gs://b/sweep, expected a folder of this machine"),
  ],
)
def test_mistakes_take_one_line(more, complaint, tmp_path, capsys):
  arguments = [part.replace("OUT", str(tmp_path / "out")) for part in ARGUMENTS]
  assert sweep.main([*arguments, *more]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and complaint in line
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  "more, complaint",
  [
    (["--seds=3"], "unknown argument --seds=3"),
    (["--config.x"], "unknown argument --config.x"),
    (["--seeds=0"], "--seeds=0, expected at least 1"),
    (["--jobs=-1"], "expected at least 1"),
    (["--config=tile.py:ci"], "the same --config twice"),
    ([f"--config={configs.folder()}/tile.py:ci"], "the same --config twice"),
    (["--grid=seed:5,6"], "--seeds"),  # seeds are given by their number alone
    (["--config.seed=3"], "--seeds"),
  ],
)
def test_arguments_of_no_use_are_refused(more, complaint, capsys):
  with pytest.raises(SystemExit):
    sweep.main([*ARGUMENTS, *more])
  assert complaint in capsys.readouterr().err


def test_fields_go_to_every_run_and_what_follows_the_dashes_to_beam():
  args = sweep._parse([*ARGUMENTS, "--config.train.epochs=2", "--synthetic", "--", "--runner=X"])
  assert (args.fields, args.beam) == (["--config.train.epochs=2"], ["--runner=X"])
  command = sweep._command_of(args, "tile.py:ci")
  assert command[0] == sys.executable and "run.tile()" in command[3]
  assert command[-2:] == ["--synthetic", "--config.train.epochs=2"]


def test_the_command_of_a_run_ends_with_its_sweep_and_carries_out_the_config(monkeypatch):
  done = []
  monkeypatch.setattr(tasks, "end_with_parent", lambda number: done.append("watched"))
  monkeypatch.setattr("tpugraphs_jax.run.layout", lambda: done.append(list(sys.argv)))
  monkeypatch.setattr(sys, "argv", ["-c", "--config=x"])
  value = "layout.py:xla-random,ci"
  exec(sweep._command_of(sweep._parse([f"--config={value}", "--out=o"]), value)[3], {})
  assert done == ["watched", ["run_layout.py", "--config=x"]]


def test_a_grid_has_options_of_the_model_that_a_flag_names():
  value = "tile.py:ci"
  args = sweep._parse([f"--config={value}", "--out=o", "--config.model.name=MLP"])
  commands, grid = {value: sweep._command_of(args, value)}, {"model.num_layers": ["2", "0"]}
  with pytest.raises(ValueError, match="num_layers=0: --config.model.num_layers is 0"):
    sweep._check_configs(sweep.runs_of(commands, "o", grid, [0]))


def test_missing_runs_are_done_and_the_sweep_is_summed_up(tmp_path, monkeypatch, capsys):
  done = []

  def run(work, todo, *, processes, beam, finished):
    assert work is sweep.do and processes == 2 and beam == ["--runner=X"]
    for run in todo:
      done.append(run.name)
      finished(write_run(tmp_path / run.name, seed=run.seed))

  monkeypatch.setattr(tasks, "run", run)
  monkeypatch.setattr(sweep.report, "write", lambda runs, out: out.write_text(f"{len(runs)}"))
  write_run(tmp_path / "base/seed_0")
  arguments = ["--config=tile.py:ci", f"--out={tmp_path}", "--jobs=2"]
  assert sweep.main([*arguments, "--seeds=2", "--", "--runner=X"]) == 0
  assert done == ["base/seed_1"] and (tmp_path / "report.html").read_text() == "2"
  said = capsys.readouterr().out
  assert "2 runs, of which 1 are done" in said
  assert "seed_0 and 1 more: Kendall tau 1.000, mean of 6" in said
  monkeypatch.setattr(tasks, "run", lambda *args, **options: None)
  assert sweep.main([*arguments, "--seeds=3"]) == 1  # one is still missing
  assert "2 of 3 runs are done" in capsys.readouterr().out


RUN = """
import pathlib, signal, sys, time
from tpugraphs_jax.infra import files, tasks
folder = pathlib.Path(sys.argv[1].partition("=")[2])
signal.signal(signal.SIGTERM, lambda *_: (folder / "saved").touch() or sys.exit(0))
tasks.end_with_parent(signal.SIGTERM)
(folder / "begun").touch()
while True:
  time.sleep(1)
"""
SWEEP = """
import os, sys
from tpugraphs_jax.infra import files, tasks
from tpugraphs_jax import sweep
if __name__ == "__main__":
  sys.stdout = sys.stderr = open(os.devnull, "w")
  runs = [sweep.SweepRun(name, {out!r}, {command!r}, (), 0) for name in ("one", "two")]
  with tasks.stopping():
    tasks.run(sweep.do, runs, processes={processes})
"""


@pytest.mark.parametrize(
  "processes, number", [(1, signal.SIGTERM), (1, signal.SIGKILL), (2, signal.SIGTERM)]
)
def test_runs_are_saved_and_end_with_their_sweep(tmp_path, processes, number):
  script, command = tmp_path / "sweeping.py", (sys.executable, "-c", RUN)
  script.write_text(SWEEP.format(out=str(tmp_path), command=command, processes=processes))
  process = commands.server().Process(target=runpy.run_path, args=(str(script), None, "__main__"))
  process.start()
  folders = [tmp_path / name for name in ("one", "two")[:processes]]
  commands.wait_until(lambda: all((folder / "begun").exists() for folder in folders))
  os.kill(process.pid, number)
  process.join()
  if number == signal.SIGTERM:
    assert process.exitcode == 143
    assert all((folder / "saved").exists() for folder in folders)
  commands.wait_until(lambda: all((folder / "saved").exists() for folder in folders))


@pytest.mark.parametrize("text", ["", "[]"])
def test_damaged_settings_of_a_sweep_are_named(tmp_path, capsys, text):
  (tmp_path / "sweep.json").write_text(text)
  assert sweep.main(["--config=tile.py:ci", f"--out={tmp_path}"]) == 2
  assert "sweep.json" in capsys.readouterr().err


def test_output_is_kept_whatever_its_bytes_are(tmp_path):
  sweep.do(a_run(tmp_path, [sys.executable, "-c", "import os; os.write(1, bytes([255, 10]))"]))
  run = a_run(tmp_path)
  assert (run.folder / "log.txt").read_bytes().splitlines()[1:] == [b"\xff"]
  assert sweep.row_of(run)["state"] == "\ufffd"


def test_a_run_ends_where_its_sweep_has_ended_before_it_began(tmp_path):
  ended = subprocess.Popen(["true"])
  ended.wait()
  process = subprocess.Popen(
    [sys.executable, "-c", RUN, f"--workdir={tmp_path}"],
    env=os.environ | {tasks.PARENT: str(ended.pid)},
  )
  assert process.wait(commands.LONGEST_WAIT_SECONDS) == 0 and (tmp_path / "saved").exists()
