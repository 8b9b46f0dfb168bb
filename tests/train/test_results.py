"""The summary file of a run, and warnings about its rankings."""

import json
import math
import types

import numpy as np
import pytest

from tests.support import parts
from tpugraphs_jax.data.selection import TileData
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.train import checkpoint, loop, results


def test_sections_are_replaced_and_the_others_stay(tmp_path):
  results.update_summary(tmp_path, training={"step": 1}, seed=3)
  results.update_summary(tmp_path, training={"step": 2})
  assert results.read_summary(tmp_path) == {"training": {"step": 2}, "seed": 3}


def test_nan_is_written_as_null(tmp_path):
  results.update_summary(tmp_path, validation={"metrics": {"a": math.nan, "b": np.float64(0.5)}})
  text = (tmp_path / "summary.json").read_text()
  assert json.loads(text)["validation"]["metrics"] == {"a": None, "b": 0.5} and "NaN" not in text


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_summary_is_begun_anew(tmp_path, text):
  (tmp_path / "summary.json").write_text(text)
  results.update_summary(tmp_path, seed=1)
  assert results.read_summary(tmp_path) == {"seed": 1}


def test_a_new_run_leaves_nothing_of_an_earlier_one(tmp_path):
  config = parts.config_of("tile", seed=7, data_root="data", **{"data.search": ""})
  results.update_summary(tmp_path, validation={})
  results.begin_summary(config, tmp_path, TileData(Collection("tile:xla")))
  found = results.read_summary(tmp_path)
  assert "validation" not in found and found["model"] == "EarlyJoinSAGE" and found["seed"] == 7


@pytest.mark.parametrize("kept, other", [("best", "last"), ("last", "best")])
def test_the_summary_calls_the_step_of_the_model_by_what_chose_it(kept, other):
  config = parts.config_of("tile", **{"train.result": kept})
  end = loop.TrainResult(None, 9, checkpoint.Progress(0.25, 6), "last epoch", 1.0)
  found = results.training_section(config, end, graphs=2, seconds=3.0)
  assert (found[kept]["step"], found[kept]["value"]) == (6, 0.25) and other not in found


@pytest.mark.parametrize(
  "error, why",
  [
    (SystemExit(143), "asked to stop (SIGTERM)"),
    (SystemExit(130), "asked to stop (SIGINT)"),
    (FloatingPointError("the loss is nan at step 3 (x); lower"), "the loss is nan at step 3 (x)"),
  ],
)
def test_an_interrupted_run_says_why(tmp_path, error, why):
  with pytest.raises(type(error)):
    with results.interruptions(tmp_path):
      raise error
  assert results.read_summary(tmp_path)["training"]["ended"] == why


def test_graphs_with_ties_at_the_top_of_their_ranking_are_named(tmp_path, caplog):
  data = types.SimpleNamespace(
    collection=Collection("tile:xla"),
    load=lambda *_: [types.SimpleNamespace(name=name) for name in ("tied_graph", "clear_graph")],
  )
  ranker = types.SimpleNamespace(scores=lambda graphs: [np.zeros(8), np.arange(8.0)])
  results.predict(data, ranker, tmp_path)
  assert "tied_graph" in caplog.text and "clear_graph" not in caplog.text


@pytest.mark.parametrize("count", [1, 2])
def test_graphs_on_which_a_judged_model_was_trained_are_named(count, caplog):
  ranker = lambda names: types.SimpleNamespace(about={"training_graphs": names} if names else {})
  graphs = [types.SimpleNamespace(name=name) for name in ("seen", "new")]
  results._warn_of_training([ranker([])] * count, graphs)
  assert not caplog.text
  results._warn_of_training([ranker(["other", "seen"]), ranker(["other"])][:count], graphs)
  (said,) = caplog.messages
  assert said.startswith("1 of 2 judged graphs") and said.endswith(": seen")
  assert ("ensemble" in said) == (count == 2)
