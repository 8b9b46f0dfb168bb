"""The race of all systems: runs stop at their budget, are made once and become one table."""

import argparse
import itertools
import json
import os
import pathlib
import sys
import types

import commands
import jax
import numpy as np
import pytest

from tpugraphs_jax.data import npz, synthetic
from tpugraphs_jax.run import job as job_lib

BENCHMARKS = commands.ROOT / "benchmarks"
# Each of the tests' four devices has a graph.
SMALL = "+model.hidden_dim=8+batch.graphs=4"
SYSTEMS = ("MLP,ci" + SMALL, "ci+model.num_gnns=1" + SMALL)
FIGURES = {"kendaltau", "opa", "slowdown1", "slowdown5", "parameters", "steps", "step_ms",
           "train_cpu_s", "rank_cpu_s", "peak_mib", "versions", "machine"}
MINUTES = 0.01


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def command(tmp_path, monkeypatch):
  """Runs the command as from a shell, and what it starts as processes in this one."""
  import systems
  cores = []

  def run(*arguments):
    monkeypatch.setattr(sys, "argv", ["systems.py", *map(str, arguments)])
    systems.main()

  def in_this_process(script, *arguments):
    out = tmp_path / "figures.json"
    run("--out", out, *arguments)
    return json.loads(out.read_text())

  monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: cores.append(chosen),
                      raising=False)
  monkeypatch.setattr(systems.timing, "in_subprocess", in_this_process)
  run.cores = cores
  return run


@pytest.fixture
def a_step_takes_two_milliseconds(monkeypatch):
  """A clock for the race that no other load of the machine reaches: it moves when it is read."""
  import race_run
  ticks = itertools.count()
  monkeypatch.setattr(
      race_run, "time", types.SimpleNamespace(process_time=lambda: next(ticks) * 2e-3))


def test_two_systems_race_and_a_second_call_makes_what_is_missing(
    command, a_step_takes_two_milliseconds, tmp_path, capsys):
  # So few kernels that all batches have one shape.
  root = synthetic.generate(tmp_path, collections=["tile:xla"], limit=2, progress=False)
  flags = ["--collections", "tile:xla", "--data_root", root, "--workdir", tmp_path, "--core", "0",
           "--minutes", MINUTES, "--seeds", "0", "--systems"]
  command(*flags, SYSTEMS[0])
  assert command.cores == [{0}]
  (first,) = (tmp_path / "runs").iterdir()
  saved = first.stat().st_mtime_ns
  command(*flags, *SYSTEMS, "--out", tmp_path / "systems.json", "--table", tmp_path / "table.md",
          "--plot", tmp_path / "plot.png")
  rows = [json.loads(path.read_text()) for path in (tmp_path / "runs").iterdir()]
  assert {(row["system"], row["seed"]) for row in rows} == {(system, 0) for system in SYSTEMS}
  assert first.stat().st_mtime_ns == saved and len(command.cores) == 2
  for row in rows:
    assert FIGURES <= row.keys() and row["step_ms"] == pytest.approx(2)
    # The budget of 0.6 seconds holds 300 steps.
    assert row["steps"] == row["planned_steps"] == 300
    assert row["train_cpu_s"] == pytest.approx(60 * MINUTES)
    assert row["compile_s"] > 0 and row["rank_cpu_s"] > 0
  found = json.loads((tmp_path / "systems.json").read_text())["tile:xla"]
  assert set(found["systems"]) == set(SYSTEMS) and found["bounds"]["ceiling"]["opa"] > 0.5
  names = [line.split("|")[1].strip(" `") for line in
           (tmp_path / "table.md").read_text().splitlines()[4:]]
  assert names[0] == "ceiling (no noise)" and names[-1] == "random order"
  slowdown = {system: row["slowdown1"] for system, row in found["systems"].items()}
  assert names[1:-1] == sorted(slowdown, key=slowdown.get)
  assert (tmp_path / "plot.png").stat().st_size > 1000
  command(*flags, *SYSTEMS, "nothing", "--recorded", "--table", tmp_path / "again.md")
  assert len(command.cores) == 2  # nothing is trained, and a system without runs has no row
  assert (tmp_path / "again.md").read_text() == (tmp_path / "table.md").read_text()
  assert "seed 0" in capsys.readouterr().out


def test_a_run_stops_at_its_budget_though_it_planned_more(
    command, a_step_takes_two_milliseconds, tmp_path, monkeypatch):
  import race_run
  monkeypatch.setattr(race_run, "seconds_per_step", lambda *unused: 1e-3)
  root = synthetic.generate(tmp_path, collections=["tile:xla"], limit=2, progress=False)
  command("--collections", "tile:xla", "--data_root", root, "--workdir", tmp_path, "--core", "0",
          "--seeds", "0", "--minutes", MINUTES, "--systems", SYSTEMS[0])
  (path,) = (tmp_path / "runs").iterdir()
  row = json.loads(path.read_text())
  assert row["planned_steps"] == 600 and row["steps"] in (300, 301)  # sums of floats


def test_a_run_may_have_a_number_of_steps_instead_of_a_time(command, tmp_path):
  root = synthetic.generate(tmp_path, collections=["tile:xla"], limit=2, progress=False)
  command("--collections", "tile:xla", "--data_root", root, "--workdir", tmp_path, "--core", "0",
          "--seeds", "0", "--steps", "7", "--systems", SYSTEMS[0])
  (path,) = (tmp_path / "runs").iterdir()
  row = json.loads(path.read_text())
  assert "7steps" in path.name and row["steps"] == row["planned_steps"] == 7


def test_a_run_of_one_step_which_compiles_has_the_time_that_was_planned(
    command, tmp_path, monkeypatch):
  import race_run
  monkeypatch.setattr(race_run, "seconds_per_step", lambda *unused: 54.0)
  root = synthetic.generate(tmp_path, collections=["tile:xla"], limit=2, progress=False)
  command("--collections", "tile:xla", "--data_root", root, "--workdir", tmp_path, "--core", "0",
          "--seeds", "0", "--minutes", "0.9", "--systems", SYSTEMS[0])
  (path,) = (tmp_path / "runs").iterdir()
  row = json.loads(path.read_text())
  assert row["steps"] == 1 and row["step_ms"] == 54_000


def test_of_own_programs_the_best_state_on_valid_is_judged_on_test(command, tmp_path, monkeypatch):
  import race_run
  import systems
  asked = []

  class Examined:
    """Says that the second of the states is the best one."""

    def __init__(self, job, graphs, ids=None):
      self._count, self._seen, self.ids = len(graphs), [], ids
      asked.append((job.data.collection.name, sorted(graph.name for graph in graphs)))

    def scores(self, scorer, params):
      self._seen.append(params)
      asked.append((self._count, len(self._seen), params))
      return [], 1.0

    def judge(self, scores):
      return dict.fromkeys(systems.COLUMNS["layout"], float(len(self._seen) == 2))

  monkeypatch.setattr(race_run, "Examined", Examined)
  monkeypatch.setattr(race_run, "seconds_per_step", lambda *unused: 54.0)  # 10 steps in 9 minutes
  command("--collections", systems.OWN, "--workdir", tmp_path, "--core", "0", "--seeds", "0",
          "--minutes", "9", "--systems", "official,ci")
  (path,) = (tmp_path / "runs").iterdir()
  row = json.loads(path.read_text())
  assert row["steps"] == row["planned_steps"] == 10
  assert row["valid_kendaltau"] == 1 and row["chosen_steps"] == 2
  # 10 steps halved: 5, 2 and 1, and then 1 again.
  root = commands.ROOT / "data/own/npz"
  valid, test = ([path.stem for path in npz.split_files(root, systems.OWN, split)]
                 for split in ("valid", "test"))
  assert [entry[:2] for entry in asked] == [
      (systems.OWN, valid), (len(valid), 1), (len(valid), 2), (len(valid), 3), (len(valid), 4),
      (systems.OWN, test), (len(test), 1)]
  states = [entry[2] for entry in asked if len(entry) == 3]
  jax.tree.map(np.testing.assert_array_equal, states[-1], states[1])
  assert not np.array_equal(*(jax.tree.leaves(states[place])[0] for place in (1, 3)))


@pytest.mark.parametrize("collection, name", [
    ("layout:xla:random", "layout:xla:random"), ("layout:nlp:default", "layout:nlp:default"),
    ("layout:own:programs", "layout:own:programs"), ("tile:xla", "tile:xla")])
def test_every_system_of_a_collection_makes_a_job_of_it(collection, name):
  import systems
  found = systems.systems_of(systems.kind_of(collection))
  assert "official" in found and {"recommended", "tables"} & found.keys()
  for system in found:
    job = job_lib.Job.of(systems.config_of(collection, system, 0, ""))
    assert job.data.collection.name == name


def test_what_was_published_for_some_programs_races_on_these_and_on_own_ones():
  import systems
  seconds = {"second_xla", "second_nlp"}
  assert seconds & set(systems.racing("layout:xla:random")) == {"second_xla"}
  assert seconds & set(systems.racing("layout:nlp:default")) == {"second_nlp"}
  assert {*systems.systems_of("layout")} - {"fifth_all"} == {
      system for system in systems.racing(systems.OWN) if "&" not in system}
  assert "fifth_all" in systems.racing("layout:xla:random")
  assert {*systems.systems_of("tile")} < {*systems.racing("tile:xla")}


@pytest.mark.parametrize("collection", [
    "layout:xla:random", "layout:nlp:default", "layout:own:programs", "tile:xla"])
def test_ensembles_have_at_most_five_members_with_other_seeds(collection):
  import systems
  for system in systems.ENSEMBLES[collection]:
    members = systems.members_of(collection, system, 2, "")
    assert 1 < len(members) <= 5
    assert [config.seed for config in members] == [2 + 1000 * n for n in range(len(members))]
    assert [config.to_dict() | {"seed": 2} for config in members] == [
        systems.config_of(collection, name, 2, "").to_dict() for name in system.split("&")]


def test_an_ensemble_shares_three_budgets_and_averages_scores_between_0_and_1(monkeypatch):
  import race_run
  made = {"a": [np.array([1.0, 3, 2]), np.array([5.0, 5])], "b": [np.array([0.0, 10, 10]), np.array([2.0, 1])]}
  judged, budgets, asked = [], [], []

  class Examined:
    def __init__(self, name):
      self.ids = f"configurations of {name}"

    def judge(self, scores):
      judged.extend(scores)
      return {"kendaltau": 0.5}

  def train(config, folder, *, budget, steps, ids):
    budgets.append(budget)
    asked.append(ids)
    return race_run.Trained(Examined(config), made[config], dict.fromkeys(race_run._SUMS, 2) | {
        "step_ms": 4.0, "peak_mib": 7.0})

  monkeypatch.setattr(race_run, "train", train)
  found = race_run.measure(["a", "b"], pathlib.Path("."), budget=180)
  # Seeds draw the configurations that are judged: those of the first one count.
  assert asked == [None, "configurations of a"]
  assert budgets == [90, 90] and found["members"] == 2 and found["steps"] == 4
  assert found["step_ms"] == 4 and found["peak_mib"] == 7
  np.testing.assert_allclose(judged[0], [0, 1, 0.75])
  np.testing.assert_allclose(judged[1], [0.5, 0])
  judged.clear()
  race_run.measure(["a"], pathlib.Path("."), budget=180)
  assert budgets[-1] == 180
  np.testing.assert_array_equal(judged[0], made["a"][0])  # as they are


def test_a_ranker_is_examined_on_the_configurations_that_it_is_given():
  import race_run
  scored = []

  def scorer(params, graphs, ids):
    scored.append(ids)

  job = types.SimpleNamespace(
      ranker=None, config=types.SimpleNamespace(eval=types.SimpleNamespace(configs=2)),
      data=types.SimpleNamespace(validation_ids=lambda name, configs: np.arange(configs)))
  graphs = [types.SimpleNamespace(name=name, configs=n) for name, n in (("a", 3), ("b", 2))]
  own = race_run.Examined(job, graphs)
  assert [found.tolist() for found in own.ids] == [[0, 1, 2], [0, 1]]
  ids = [np.array([2, 0, 1]), np.array([1])]
  race_run.Examined(job, graphs, ids).scores(scorer, None)
  assert [found.tolist() for found in scored[0]] == [[2, 0], [1]]  # compiles
  assert scored[1] is ids


def test_a_member_that_diverged_takes_its_ensemble_with_it(monkeypatch):
  import race_run

  def train(config, folder, *, budget, steps, ids):
    raise race_run.Diverged("the loss is nan after 1 of 2 steps")

  monkeypatch.setattr(race_run, "train", train)
  assert race_run.measure(["a", "b"], pathlib.Path("."), budget=1) == {
      "error": "the loss is nan after 1 of 2 steps"}


def test_fields_of_a_system_are_changed_by_name():
  import systems
  config = systems.config_of(
      "layout:xla:random", "tables+loss.noise=0.01+optimizer.average_window=[0.5,1]+"
      "batch.target=official", 0, "")
  assert config.loss.noise == 0.01 and config.optimizer.average_window == (0.5, 1)
  assert config.batch.target == "official" and config.model.name == "ScoreTables"


@pytest.mark.parametrize("collection", ["tile:xla", "layout:own:programs"])
def test_every_ablation_changes_what_is_recommended(collection):
  import systems
  (base, plain), *others = systems.ablations(collection).items()
  assert base == plain
  configs = [systems.config_of(collection, system, 0, "") for _, system in others]
  for config in configs:
    job_lib.Job.of(config)  # it could be trained
  texts = [config.to_json() for config in (systems.config_of(collection, base, 0, ""), *configs)]
  assert len(set(texts)) == len(texts) > 5


def test_ablations_have_their_words_in_the_table(tmp_path, monkeypatch, capsys):
  import systems
  monkeypatch.setattr(systems, "limits", lambda *unused: {"random": {}})
  monkeypatch.setattr(systems.timing, "in_subprocess", lambda *flags: row(0.5))
  monkeypatch.setattr(sys, "argv", [
      "systems.py", "--ablations", "--collections", "tile:xla", "--workdir", str(tmp_path),
      "--seeds", "0"])
  systems.main()
  told = capsys.readouterr().out
  assert all(f"| `{name}` |" in told for name in systems.ablations("tile:xla"))
  assert len(list((tmp_path / "runs").iterdir())) == len(systems.ablations("tile:xla"))


@pytest.mark.parametrize("steps", [1, 123, 999, 1000, 54321])
def test_the_schedule_ends_with_the_planned_steps(steps):
  import race_run
  import systems
  before = job_lib.Job.of(systems.config_of("layout:xla:random", "tables", 0, ""))
  config = race_run.planned(before, steps).config
  found = config.train.epochs * config.batch.slates_per_epoch / config.batch.graphs
  assert abs(found - steps) <= config.train.epochs / 2  # less than a tenth of a percent
  assert config.batch.slates_per_epoch <= 1000 * config.batch.graphs
  assert before.config.train.epochs == 10  # of which it is a copy


def test_the_steps_of_one_network_are_shared_by_its_collections():
  import race_run
  import systems
  job = job_lib.Job.of(systems.config_of("layout:xla:random", "fifth_all", 0, ""))
  found = race_run.planned(job, 5000)
  for part in (found, *found.also):
    assert part.config.train.epochs == 10
    assert part.config.batch.slates_per_epoch == 100 * part.config.batch.graphs
  assert len(found.also) == 4 and job.also[0].config.train.epochs == job.config.train.epochs


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
  import systems
  args = argparse.Namespace(
      collections=["tile:xla"], systems=["x", "y"], seeds=[0, 1], minutes=1.0, steps=0, workdir=tmp_path,
      data_root="", own_root="", core=0, recorded=False, ablations=False)
  made = {"x": row(0.1), "y": {"error": "the loss is nan after 3 of 9 steps"}}
  monkeypatch.setattr(systems.timing, "in_subprocess",
                      lambda *flags: made[flags[flags.index("--systems") + 1]])
  monkeypatch.setattr(systems, "limits", lambda *unused: {"random": {}})
  found = systems.race(args)["tile:xla"]["systems"]
  assert set(found) == {"x"} and found["x"]["failed"] == 0 and found["x"]["seeds"] == 2
  assert "y  seed 1: the loss is nan after 3 of 9 steps" in capsys.readouterr().out
