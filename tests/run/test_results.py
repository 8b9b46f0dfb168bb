"""The lines and files of a run are right in every number, and whole whatever happens."""

import json
import math
import types

import numpy as np
import parts
import pytest

from tpugraphs_jax.run import job as job_lib, results


def graph(*, nodes, configs):
  return types.SimpleNamespace(opcode=np.zeros(nodes), configs=range(configs))


def banner(tmp_path, **changes):
  """The rows of a banner by their first word."""
  config = parts.config_of("tile", "ci", **changes)
  with config.unlocked():
    config.data_root = str(tmp_path / "npz")
  params = {"dense": {"kernel": np.zeros((4, 5)), "bias": np.zeros(5)}}
  stage = types.SimpleNamespace(
      epochs=3, plan=types.SimpleNamespace(steps_per_epoch=8),
      state=types.SimpleNamespace(params=params))
  prepared = types.SimpleNamespace(
      train=[graph(nodes=7, configs=10), graph(nodes=1200, configs=1000)],
      valid=[graph(nodes=9, configs=30)], also=[])
  text = results.banner(job_lib.Job.of(config), stage, prepared, tmp_path / "run")
  return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_a_banner_counts_graphs_steps_parameters_and_devices(tmp_path):
  found = banner(tmp_path, **{"batch.graphs": 4, "batch.configs": 6, "model.precision": "high"})
  assert found["training"] == "2 graphs of 7 to 1,200 nodes, 1,010 configurations"
  assert found["steps"] == "24 in 3 epochs of 8, each of 4 graphs with 6 configurations"
  assert "25 parameters" in found["model"] and found["model"].startswith("EarlyJoinSAGE, ")
  assert found["model"].endswith("matrix products high")
  assert found["devices"].startswith("4 x cpu")  # the tests' fake ones


@pytest.mark.parametrize("count, words", [
    (0, "judged by opa_pooled on all of them"), (5, "judged by opa_pooled on a seeded 5 of each graph")])
def test_the_protocol_of_validation_is_said(tmp_path, count, words):
  found = banner(tmp_path, **{"train.valid_configs": count})
  assert found["validation"] == f"1 graph of 9 nodes, 30 configurations; {words}"


def test_the_kind_of_labels_is_said(tmp_path):
  assert "measured" in banner(tmp_path)["labels"]
  (tmp_path / "synthetic.json").write_text("{}")
  assert banner(tmp_path)["labels"].startswith("SYNTHETIC")


def test_sections_are_replaced_and_the_others_stay(tmp_path):
  results.update_summary(tmp_path, training={"step": 1}, seed=3)
  results.update_summary(tmp_path, training={"step": 2})
  assert results.read_summary(tmp_path) == {"training": {"step": 2}, "seed": 3}


def test_numbers_that_are_none_are_null(tmp_path):
  results.update_summary(tmp_path, validation={"metrics": {"a": math.nan, "b": np.float64(0.5)}})
  text = (tmp_path / "summary.json").read_text()
  assert json.loads(text)["validation"]["metrics"] == {"a": None, "b": 0.5} and "NaN" not in text


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_summary_is_begun_anew(tmp_path, text):
  (tmp_path / "summary.json").write_text(text)
  results.update_summary(tmp_path, seed=1)
  assert results.read_summary(tmp_path) == {"seed": 1}


def test_a_new_run_leaves_nothing_of_an_earlier_one(tmp_path):
  config = parts.config_of("tile", seed=7, **{"data.search": ""})
  with config.unlocked():
    config.data_root = "data"
  results.update_summary(tmp_path, validation={})
  results.begin_summary(config, tmp_path, "tile:xla")
  found = results.read_summary(tmp_path)
  assert "validation" not in found and found["model"] == "EarlyJoinSAGE" and found["seed"] == 7


@pytest.mark.parametrize("error, why", [
    (SystemExit(143), "asked to stop (SIGTERM)"), (SystemExit(130), "asked to stop (SIGINT)"),
    (FloatingPointError("the loss is nan at step 3 (x); lower"), "the loss is nan at step 3 (x)")])
def test_an_interrupted_run_says_why(tmp_path, error, why):
  with pytest.raises(type(error)):
    with results.interruptions(tmp_path):
      raise error
  assert results.read_summary(tmp_path)["training"]["ended"] == why


@pytest.mark.parametrize("count, expected", [(0, "all"), (50, "a seeded 50 of each graph")])
def test_training_is_judged_on_what_it_says(count, expected):
  config = parts.config_of("tile", **{"train.valid_configs": count})
  result = types.SimpleNamespace(why="last epoch (2)", step=8, compile_seconds=1.0, peak_bytes=5,
                                 best_step=4, best_value=0.5)
  found = results.of_training(config, result, graphs=3, seconds=2.0)
  assert found["best"] == {"step": 4, "metric": "valid_sample/opa_pooled", "value": 0.5, "split": "valid",
                           "graphs": 3, "configurations": expected}
