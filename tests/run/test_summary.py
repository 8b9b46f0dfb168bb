"""summary.json is whole JSON whatever happens, and says why a run ended."""

import json
import math
import types

import numpy as np
import parts
import pytest

from tpugraphs_jax.run import results


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


def test_no_name_stands_for_two_figures():
  found = summary.of_evaluation(
      {"opa": 0.75, "kendaltau": 0.5}, {"opa": 0.5}, "all", [np.arange(3), np.arange(4)], 2.0,
      split="valid")
  assert found["metrics"] == {"opa_pooled": 0.75, "kendaltau_mean": 0.5}
  assert found["random_order"] == {"opa_pooled": 0.5}
  assert (found["graphs"], found["configurations_judged"]) == (2, 7)


@pytest.mark.parametrize("count, expected", [(0, "all"), (50, "a seeded 50 of each graph")])
def test_training_is_judged_on_what_it_says(count, expected):
  config = parts.config_of("tile", **{"train.valid_configs": count})
  result = types.SimpleNamespace(why="last epoch (2)", step=8, compile_seconds=1.0, peak_bytes=5,
                                 best_step=4, best_value=0.5)
  found = results.of_training(config, result, graphs=3, seconds=2.0)
  assert found["best"] == {"step": 4, "metric": "valid_sample/opa_pooled", "value": 0.5, "split": "valid",
                           "graphs": 3, "configurations": expected}
