"""The race of all systems: runs stop at their budget, are made once and become one table."""

import json
import os
import subprocess
import sys

import commands
import numpy as np
import pytest

from tpugraphs_jax.data import synthetic
from tpugraphs_jax.run import jobs

BENCHMARKS = commands.ROOT / "benchmarks"
SYSTEMS = {"layout": ("ci", "official,ci"), "tile": ("ci", "MLP,ci")}
FIGURES = {"kendaltau", "opa", "slowdown1", "slowdown10", "parameters", "steps", "step_ms",
           "train_cpu_s", "rank_cpu_s", "peak_mib", "versions", "machine"}
MINUTES = 0.01


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
  return synthetic.generate(
      tmp_path_factory.mktemp("data"), collections=["layout:xla:random", "tile:xla"], limit=4,
      progress=False)


def run(folder, data_root, *arguments):
  command = [sys.executable, str(BENCHMARKS / "systems.py"), "--data_root", str(data_root),
             "--workdir", str(folder), "--minutes", str(MINUTES), *arguments]
  return subprocess.run(command, check=True, capture_output=True, text=True,
                        env=os.environ | {"PYTHONPATH": str(commands.ROOT)}).stdout


def test_two_systems_race_and_a_second_call_makes_what_is_missing(data_root, tmp_path):
  flags = ["--collections", "layout:xla:random", "--systems", *SYSTEMS["layout"],
           "--out", str(tmp_path / "systems.json"), "--table", str(tmp_path / "systems.md"),
           "--plot", str(tmp_path / "systems.png")]
  assert "ci  seed 0" in run(tmp_path, data_root, *flags, "--seeds", "0")
  files = sorted((tmp_path / "runs").iterdir())
  before = [path.stat().st_mtime_ns for path in files]
  rows = [json.loads(path.read_text()) for path in files]
  assert {(row["system"], row["seed"]) for row in rows} == {(s, 0) for s in SYSTEMS["layout"]}
  for row in rows:
    assert FIGURES <= row.keys() and row["steps"] <= row["planned_steps"]
    # One more step than the budget holds, at most.
    assert row["train_cpu_s"] <= 60 * MINUTES + row["step_ms"] / 1e3 + 1e-6
    assert row["train_cpu_s"] > 15 * MINUTES and row["compile_s"] > 0
  text = run(tmp_path, data_root, *flags, "--seeds", "0")
  assert "seed 0" not in text and [path.stat().st_mtime_ns for path in files] == before
  found = json.loads((tmp_path / "systems.json").read_text())["layout:xla:random"]
  assert set(found["systems"]) == set(SYSTEMS["layout"])
  assert found["bounds"]["ceiling"]["kendaltau"] > 0 == found["bounds"]["random"]["kendaltau"]
  lines = (tmp_path / "systems.md").read_text().splitlines()
  assert [line.split("|")[1].strip() for line in lines[4:]][::5] == [
      "ceiling (no noise)"] and len(lines) == 8
  assert (tmp_path / "systems.png").stat().st_size > 1000


def test_a_run_in_this_process_is_of_kernels_too(data_root, tmp_path):
  import systems
  config = systems.config_of("tile:xla", "ci", 3, str(data_root))
  config.batch.graphs = 4  # of which each of the tests' devices has one
  row = systems.measure(config, tmp_path, budget=0.3)
  assert FIGURES - {"steps"} <= row.keys() | {"steps"} and np.isfinite(row["slowdown5"])


@pytest.mark.parametrize("collection, name", [
    ("layout:xla:random", "layout:xla:random"), ("layout:nlp:default", "layout:nlp:default"),
    ("layout:own:programs", "layout:own:programs"), ("tile:xla", "tile:xla")])
def test_every_system_of_a_collection_makes_a_job_of_it(collection, name):
  import systems
  found = systems.systems_of(systems.kind_of(collection))
  assert {"recommended", "official"} <= found.keys()
  for variant in found.values():
    job = jobs.Job.of(systems.config_of(collection, variant, 0, ""))
    assert job.data.collection.name == name


def test_the_schedule_ends_with_the_planned_steps():
  import systems
  config = systems.planned(systems.config_of("layout:xla:random", "", 0, ""), 123)
  assert config.train.epochs == 1 and config.batch.slates_per_epoch == 123 * config.batch.graphs


def row(value, **more):
  names = ("kendaltau", "opa", "slowdown1", "slowdown5", "slowdown10", "parameters", "steps",
           "step_ms", "rank_cpu_s", "peak_mib")
  return dict.fromkeys(names, value) | more


def test_summaries_are_means_and_the_best_comes_first():
  import systems
  results = {"a": systems.summarised([row(0.2), row(0.4)], "layout"),
             "b": systems.summarised([row(0.5)], "layout")}
  assert results["a"]["kendaltau"] == pytest.approx(0.3) and results["a"]["seeds"] == 2
  assert results["a"]["spread"]["kendaltau"] == pytest.approx(0.02 ** 0.5)
  assert results["b"]["spread"]["opa"] == 0
  assert [name for name, _ in systems.ranked(results, "layout")] == ["b", "a"]
  assert [name for name, _ in systems.ranked(results, "tile")] == ["a", "b"]  # slowdowns
  text = systems.table(results, "layout", {"random": {"kendaltau": 0.0, "opa": 0.5}})
  assert "| `a` | 0.300 ± 0.141 |" in text and text.index("`b`") < text.index("`a`")


def test_a_diverged_run_is_told_and_not_averaged(tmp_path, monkeypatch, capsys):
  import argparse

  import systems
  args = argparse.Namespace(
      collections=["tile:xla"], systems=["x", "y"], seeds=[0, 1], minutes=1.0, workdir=tmp_path,
      data_root="", own_root="", core=0)
  made = {"x": row(0.1), "y": {"error": "the loss is nan after 3 of 9 steps"}}
  monkeypatch.setattr(systems.timing, "in_subprocess",
                      lambda *flags: made[flags[flags.index("--systems") + 1]])
  monkeypatch.setattr(systems, "limits", lambda *unused: {"random": {}})
  found = systems.race(args)["tile:xla"]["systems"]
  assert set(found) == {"x"} and found["x"]["failed"] == 0 and found["x"]["seeds"] == 2
  assert "y  seed 1: the loss is nan after 3 of 9 steps" in capsys.readouterr().out
