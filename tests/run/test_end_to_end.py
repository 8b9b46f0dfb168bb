"""The two commands from data to ranking, on synthetic and on released files."""

import csv
import json
from pathlib import Path
import re
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support import comparing, recorded, small_runs
from tests.support.run_folders import metrics
from tests.support.small_runs import COLLECTIONS, COMMANDS, STOPPED_AT
from tpugraphs_jax import submission
from tpugraphs_jax.data import npz


@pytest.fixture(scope="module")
def runs():
  return small_runs.all_runs()


def rows_of(path):
  with path.open(newline="") as file:
    return list(csv.DictReader(file))


def test_commands_end_with_their_exit_codes(runs):
  assert len(runs.ended) >= 7
  for name, ended in runs.ended.items():
    assert ended.code == (143 if name.endswith("stopped") else 0), (name, ended.err)
    assert "Traceback" not in ended.err, (name, ended.err)


@pytest.mark.parametrize(
  "kind, columns",
  [
    ("tile", "graph nodes configs opa kendaltau slowdown1 slowdown5 slowdown10"),
    ("layout", "graph nodes configs opa kendaltau slowdown1 slowdown10 slowdown100"),
  ],
)
def test_a_working_folder_holds_everything(runs, kind, columns):
  workdir = runs.workdir(f"{kind}_whole")
  for name in (
    "config.json features.json checkpoints metrics.jsonl tensorboard validation.csv results.csv"
  ).split():
    assert (workdir / name).exists(), name
  assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
  assert not [path for path in workdir.rglob("*") if path.suffix == ".partial"]
  config = json.loads((workdir / "config.json").read_text())["config"]
  assert config["train"]["epochs"] == 3 and config["data_root"] == str(runs.data_root)
  rows = rows_of(workdir / "validation.csv")
  assert list(rows[0]) == columns.split()
  files = npz.split_files(runs.data_root, COLLECTIONS[kind], "valid")
  assert [row["graph"] for row in rows] == [path.stem for path in files]


@pytest.mark.parametrize("kind", COMMANDS)
def test_results_pass_the_check_of_a_submission(runs, tmp_path, kind, capsys):
  results = runs.workdir(f"{kind}_whole") / "results.csv"
  # The other collection's test graphs are not asked for.
  root = tmp_path / "npz"
  collection = Path(*COLLECTIONS[kind].split(":"))
  shutil.copytree(runs.data_root / collection, root / collection)
  assert submission.check(results, root) == []
  assert submission.main(["check", str(results), "--data_root", str(root)]) == 0
  assert "no problem" in capsys.readouterr().out
  files = npz.split_files(root, COLLECTIONS[kind], "test")
  assert set(submission.read_results(results)) == {
    f"{COLLECTIONS[kind]}:{path.stem}" for path in files
  }


def test_training_makes_rankers_better(runs):
  for kind in COMMANDS:
    rows = metrics(runs.workdir(f"{kind}_whole"))
    loss = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(loss) == 6 and loss[-1] < loss[0]
    opa = [row["valid_sample/opa_pooled"] for row in rows if "valid_sample/opa_pooled" in row]
    assert len(opa) == 3
    if kind == "tile":
      assert max(opa[1:]) > opa[0] and max(opa) > 0.65


def newest_state(workdir):
  """Everything in the newest checkpoint."""
  folders = (workdir / "checkpoints").glob("save_*")
  newest = max(folders, key=lambda path: int(path.name.split("_")[1]))
  with ocp.PyTreeCheckpointer() as checkpointer:
    return checkpointer.restore(newest / "state")


def test_stopped_and_resumed_equals_never_stopped_bit_for_bit(runs):
  """Layouts and segments are resumed in tests/faults, collections in tests/run/test_together.py."""
  assert f"SIGTERM: saved step {STOPPED_AT}" in runs.ended["tile_stopped"].out
  assert f"resumed at step {STOPPED_AT}" in runs.ended["tile_resumed"].out
  whole, stopped = runs.workdir("tile_whole"), runs.workdir("tile_stopped")
  expected = newest_state(whole)
  comparing.assert_same_trees(newest_state(stopped), expected)
  assert len(jax.tree.leaves(expected)) > 10
  assert metrics(stopped) == metrics(whole)
  for name in ("features.json", "validation.csv", "results.csv"):
    assert (stopped / name).read_bytes() == (whole / name).read_bytes()


def test_two_devices_equal_one(runs):
  rows = metrics(runs.workdir("tile_whole"))
  two = metrics(runs.workdir("tile_two_devices"))
  assert [row.keys() for row in rows] == [row.keys() for row in two]
  for a, b in zip(rows, two):
    for name in ("train/loss", "train/ranking_loss", "train/grad_norm"):
      if name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4)
  configs = [
    json.loads((runs.workdir(name) / "config.json").read_text())
    for name in ("tile_whole", "tile_two_devices")
  ]
  assert [config["devices"]["count"] for config in configs] == [1, 2]


def test_synthetic_data_are_made_when_asked_for_and_named_as_synthetic(runs):
  told, workdir = runs.ended["tile_no_data"].told, runs.workdir("tile_no_data")
  (made,) = [line for line in told if line.startswith("--synthetic")]
  assert str(workdir / "synthetic") in made and "not measured" in made
  assert "SYNTHETIC" in runs.ended["tile_no_data"].page["labels"]
  assert (workdir / "results.csv").exists()


def test_evaluation_later_needs_the_working_folder_alone(runs):
  """Overrides work without --config too: here another number of configurations per batch."""
  before, later = runs.ended["tile_no_data"].told, runs.ended["tile_later"].told
  assert later[0].startswith("tile:xla: 4 graphs  opa") and later[0] in before
  assert not any("tile:xla: ranked" in line for line in later)


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_says_what_it_does_and_how_it_ended(runs, kind):
  told = runs.ended[f"{kind}_whole"].told
  files = npz.split_files(runs.data_root, COLLECTIONS[kind], "train")
  page = runs.ended[f"{kind}_whole"].page
  assert list(page) == "task data labels training validation model devices steps folder".split()
  compiling = told.index("compiling the training step")
  assert told[compiling - 1].startswith("folder ")
  assert told[compiling + 1].startswith("first step, with compilation: ")
  # The task comes before any line about graphs.
  assert told[0].startswith("task ") and not any("graphs" in line for line in told[1:3])
  assert COLLECTIONS[kind] in page["task"] and page["training"].startswith(f"{len(files)} graphs")
  (end,) = [line for line in told if line.startswith("training ended")]
  assert re.fullmatch(
    r"training ended at step 12: last epoch \(3\); "
    r"best valid_sample/\w+ 0\.\d{4} at step \d+",
    end,
  )
  assert "skipped" not in runs.ended[f"{kind}_whole"].err
  assert not any("\r" in runs.ended[name].out + runs.ended[name].err for name in runs.ended)


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_summary_holds_every_result_with_its_protocol(runs, kind):
  workdir = runs.workdir(f"{kind}_whole")
  found = json.loads((workdir / "summary.json").read_text())
  assert found["collection"] == COLLECTIONS[kind] and found["seed"] == 0
  assert found["training"]["ended"] == "last epoch (3)" and found["training"]["step"] == 12
  assert found["training"]["seconds"] > 0 and found["training"]["peak_memory"]["bytes"] > 2**20
  assert found["training"]["best"]["configurations"].startswith("a seeded ")
  assert "jax" in found["versions"]
  validation, rows = found["validation"], rows_of(workdir / "validation.csv")
  assert (validation["split"], validation["graphs"]) == ("valid", len(rows))
  assert validation["configurations_judged"] == sum(int(row["configs"]) for row in rows)
  mean = np.mean([float(row["kendaltau"]) for row in rows])
  assert validation["metrics"]["kendaltau_mean"] == pytest.approx(mean, abs=1e-5)
  assert "opa_pooled" in validation["metrics"]


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_leaves_its_own_page(runs, kind):
  assert runs.ended[f"{kind}_whole"].told[-1].startswith("report: ")
  text = (runs.workdir(f"{kind}_whole") / "report.html").read_text()
  assert text.count("<svg") == 4 and COLLECTIONS[kind] in text


@recorded.needs_npz
def test_released_kernels_are_trained_on_and_every_test_kernel_is_ranked(runs):
  page = runs.ended["tile_real"].page
  # Six of nine training kernels have fewer than 10 configurations.
  assert page["training"].startswith("3 graphs") and page["validation"].startswith("3 graphs")
  workdir = runs.workdir("tile_real")
  assert len(rows_of(workdir / "validation.csv")) == 3
  results = submission.read_results(workdir / "results.csv")
  assert len(results) == 8
  problems = submission.check(workdir / "results.csv", recorded.NPZ)
  assert problems == [
    f"{workdir / 'results.csv'}: layout:xla:default:alexnet has no row, expected "
    f"every test graph of {recorded.NPZ}"
  ]


@recorded.needs_npz
def test_the_released_layout_graph_gets_a_full_permutation(runs):
  workdir = runs.workdir("layout_real")
  rows = rows_of(workdir / "validation.csv")
  assert [(row["graph"], row["configs"]) for row in rows] == [("alexnet", "100"), ("unet3d", "100")]
  (ranking,) = submission.read_results(workdir / "results.csv").values()
  (path,) = npz.split_files(recorded.NPZ, "layout:xla:default", "test")
  configs = len(npz.read_layout(path).configs)
  np.testing.assert_array_equal(np.sort(ranking), np.arange(configs))
