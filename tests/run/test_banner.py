"""A run's first lines say what it is about to do, in numbers that are right."""

import types

import numpy as np
import parts
import pytest

from tpugraphs_jax.run import banner


def graph(*, nodes, configs):
  return types.SimpleNamespace(opcode=np.zeros(nodes), configs=range(configs))


def phase(*, epochs=3, steps=8):
  params = {"dense": {"kernel": np.zeros((4, 5)), "bias": np.zeros(5)}}
  return types.SimpleNamespace(
      epochs=epochs, plan=types.SimpleNamespace(steps_per_epoch=steps),
      state=types.SimpleNamespace(params=params))


def page(tmp_path, kind="tile", **changes):
  config = parts.config_of(kind, "ci", **changes)
  with config.unlocked():
    config.data_root = str(tmp_path / "npz")
  train = [graph(nodes=7, configs=10), graph(nodes=1200, configs=1000)]
  text = banner.lines(
      config, "tile:xla", phase(), train, [graph(nodes=9, configs=30)], tmp_path / "run")
  return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_sizes_and_steps_are_counted(tmp_path):
  found = page(tmp_path, **{"batch.graphs": 4, "batch.configs": 6})
  assert found["training"] == "2 graphs of 7 to 1,200 nodes, 1,010 configurations"
  assert found["steps"] == "24 in 3 epochs of 8, each of 4 graphs with 6 configurations"
  assert "25 parameters" in found["model"] and found["model"].startswith("EarlyJoinSAGE, ")


@pytest.mark.parametrize("count, words", [
    (0, "judged by opa_pooled on all of them"), (5, "judged by opa_pooled on a seeded 5 of each graph")])
def test_the_protocol_of_validation_is_said(tmp_path, count, words):
  found = page(tmp_path, **{"train.valid_configs": count})
  assert found["validation"] == f"1 graphs of 9 to 9 nodes, 30 configurations; {words}"


def test_the_devices_are_those_of_jax(tmp_path):
  assert page(tmp_path)["devices"].startswith("4 x cpu")  # the tests' fake ones


def test_arithmetic_is_said(tmp_path):
  found = page(tmp_path, **{"model.dtype": "bfloat16", "model.precision": "high"})
  assert found["model"].endswith("bfloat16, matrix products high")


def test_the_kind_of_labels_is_said(tmp_path):
  assert "measured" in page(tmp_path)["labels"]
  (tmp_path / "synthetic.json").write_text("{}")
  assert page(tmp_path)["labels"].startswith("SYNTHETIC")
