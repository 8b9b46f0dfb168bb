"""The tables of the documentation are those that the benchmarks have recorded."""

import argparse
import itertools
import json
import re

import commands
import numpy as np
import pytest

BENCHMARKS = commands.ROOT / "benchmarks"
README = (commands.ROOT / "README.md").read_text()
SEGMENTS, SPEED, RESULTS, SYSTEMS, OWN_PROGRAMS = (
    (commands.ROOT / f"docs/{name}.md").read_text()
    for name in ("segments", "speed", "results", "systems", "own_programs"))


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(BENCHMARKS))


def recorded(name):
  return json.loads((BENCHMARKS / f"{name}.json").read_text())


def rows(table):
  """The rows of a Markdown table without its head, as they stand."""
  return table.splitlines()[2:]


def test_step_time_and_memory_by_graph_size():
  import gst
  for row in rows(gst.table(recorded("results")["gst"])):
    assert row in SEGMENTS


def test_quality_of_graph_segment_training():
  import gst_quality
  results = recorded("gst_quality")
  del results["machine"]
  assert set(results) == set(gst_quality.VARIANTS)
  for row in rows(gst_quality.table(results)):
    assert row in SEGMENTS


def test_speed_beside_the_plain_formulation():
  import run_all
  for row in rows(run_all.table(recorded("results"))):
    _, _, figures = row.split("|", 2)
    assert f"|{figures}" in SPEED


@pytest.mark.parametrize("collection", [
    "tile:xla", "layout:xla:random", "layout:xla:default", "layout:nlp:random",
    "layout:nlp:default"])
def test_quality_by_collection(collection):
  import quality
  results, case = recorded("quality")[collection], quality.CASES[collection]
  if collection == "tile:xla":
    for row in rows(quality.table(case.columns, results)):
      _, _, figures = row.split("|", 2)
      assert f"|{figures}" in RESULTS
    return
  (line,) = [line for line in RESULTS.splitlines() if line.startswith(f"| `{collection}` |")]
  for row, figure in zip(rows(quality.table(case.columns, results)), line.split("|")[2:]):
    assert row.split("|")[2] == figure


@pytest.mark.parametrize("name", ["own_quality", "own_quality_cpu"])
def test_quality_on_own_programs(name):
  import own_quality
  for split in own_quality.SPLITS:
    assert own_quality.table(recorded(name)[split]) in OWN_PROGRAMS


def test_steps_compiled_for_tpus():
  import tpu_compile
  results = recorded("results")["tpu_compile"]
  table = tpu_compile.table(results)
  assert table in SPEED
  assert {name for name in results if name != "machine"} >= {
      f"{case}/{step}/{target}" for case in ("tile", "ResModel", "SAGE", "tables", "gst_ed")
      for step in tpu_compile.STEPS for target in tpu_compile.TARGETS}


def test_blind_search_beside_a_model():
  import tune
  assert tune.table(recorded("results")["tune"]) in OWN_PROGRAMS


@pytest.mark.parametrize("collection", [
    "layout:own:programs", "tile:xla", "layout:xla:random", "layout:nlp:default"])
def test_the_race_of_published_systems(collection):
  import systems
  args = argparse.Namespace(
      seeds=(0, 1, 2), minutes=1.0, steps=0, workdir=BENCHMARKS / "races", ablations=False)
  runs = lambda system: [systems.row_path(args, collection, system, seed) for seed in args.seeds]
  args.systems = [
      system for system in systems.racing(collection) if all(path.exists() for path in runs(system))]
  found = systems.recorded(args, collection)
  assert systems.table(found["systems"], systems.kind_of(collection), found["bounds"]) in SYSTEMS
  # Who has not run three times is named.
  section = SYSTEMS.partition(f"`{collection}`")[2].partition("\n### ")[0]
  missing = set(systems.racing(collection)) - set(args.systems)
  (told,) = [line for line in section.splitlines() if line.startswith("Not run")] or [""]
  assert set(re.findall(r"`([\w&]+)`", told)) == missing


@pytest.mark.parametrize("collection", ["tile:xla", "layout:own:programs"])
def test_ablations_of_what_is_recommended(collection):
  import systems
  args = argparse.Namespace(
      seeds=(0, 1, 2), minutes=0.5, steps=0, workdir=BENCHMARKS / "races", ablations=True)
  found = systems.recorded(args, collection)
  assert set(found["systems"]) == set(systems.ablations(collection))
  assert all(row["seeds"] == 3 for row in found["systems"].values())
  assert systems.table(found["systems"], systems.kind_of(collection), found["bounds"]) in SYSTEMS


def test_the_cost_of_a_step_of_every_preset():
  import systems_step
  results = recorded("systems_step")
  del results["machine"]
  assert set(results) == {
      f"{kind}:{name}" for kind, names in systems_step.PRESETS.items() for name in names}
  assert systems_step.table(results) in SYSTEMS


def test_score_tables_by_collection():
  import tables_quality
  results, page = recorded("tables_quality"), (commands.ROOT / "docs/score_tables.md").read_text()
  del results["machine"]
  assert set(results) == set(tables_quality.COLLECTIONS)
  for row in tables_quality.table(results).splitlines()[2:]:
    assert row in page


def test_ablations_of_score_tables():
  import tables_quality
  results, page = recorded("tables_ablations"), (commands.ROOT / "docs/score_tables.md").read_text()
  del results["machine"]
  assert [set(found) for found in results.values()] == [set(tables_quality.ABLATIONS)]
  for row in rows(tables_quality.ablation_table(results)):
    assert row in page


def test_speed_of_score_tables():
  found, page = recorded("results")["tables"], (commands.ROOT / "docs/score_tables.md").read_text()
  ours, sage = found["training"], found["sage_training"]
  assert f"{ours['step_s']:.2f} s and {ours['peak_mib']:,.0f} MiB with 256" in page
  assert f"{sage['step_s']:.2f} s and {sage['peak_mib']:,.0f} MiB with 16" in page
  for case, digits in (("many", -3), ("sage_ranking", 0)):
    rate = round(found[case]["configs_per_s"], digits)
    assert f"{rate:,.0f} configurations a second, {found[case]['peak_mib']:,.0f} MiB" in page
  assert f"{found['split']['configs']:,} configurations" in page


def test_wins_of_proposals_are_counted_by_program():
  import tables_quality
  program = lambda near, measured: {"proposed": 0.2, "near": near, "own": 0.1, "measured": measured}
  runs = [{"seed": seed, "kendaltau": 0.8 + 0.1 * seed, "cpu_s": 10.0,
           "programs": {"a": program(0.0, 0.1), "b": program(0.1, 0.1), "c": program(0.0, 0.3)}}
          for seed in range(2)]
  found = tables_quality.summary(runs)
  assert found["mean"]["kendaltau"] == pytest.approx(0.85) and found["seeds"] == 2
  assert found["mean"]["near_wins"] == 2 and found["mean"]["proposed_wins"] == 1
  assert found["mean"]["near_best"] == 2 and found["mean"]["measured_best"] == 0
  row = tables_quality.table({"layout": {"tables": found | {"runs": runs}}}).splitlines()[2]
  assert row.endswith("| 10 | 1.0 / 2.0 of the 3 where it can | 0.0 / 2.0 / 0.0 of 3 |")
  assert tables_quality.ablation_table({"layout": {"tables": found}}).endswith(
      "| `layout` | tables | 0.850 ± 0.071 | 10 |")
  without = tables_quality.summary([{"seed": 0, "kendaltau": 0.8, "cpu_s": 9.0}])
  assert "near_wins" not in without["mean"] and without["spread"]["kendaltau"] == 0


def test_the_figures_of_the_front_page_are_those_of_the_results():
  section = README.partition("## What it reaches")[2].partition("\n## ")[0]
  table = [line for line in section.splitlines() if line.startswith("| `")]
  cells = [cell.strip() for line in table for cell in line.split("|")[2:] if cell.strip()]
  assert len(table) == 5 and all(f" {cell} |" in RESULTS for cell in cells)


@pytest.mark.parametrize("runtime", [[7, 3, 3, 9, 4, 12], [5, 5], [2], [8, 1, 6]])
def test_a_random_order_is_worth_the_mean_over_all_draws(runtime):
  import quality
  row = quality._random_row(np.array(runtime, np.int64), (1, 2, 5))
  for k in (1, 2, 5):
    draws = list(itertools.combinations(runtime, min(k, len(runtime))))
    expected = np.mean([min(draw) for draw in draws]) / min(runtime) - 1
    assert row[f"slowdown{k}"] == pytest.approx(expected)
