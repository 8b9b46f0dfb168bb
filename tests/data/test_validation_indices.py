"""The published validation indices are read as they are, and mistakes are named."""

import json

import numpy as np
import pytest
import recorded

from tpugraphs_jax.data import validation_indices



def load(folder, text):
  (folder / "xla_random.json").write_text(text)
  return validation_indices.load(str(folder), "xla", "random")


def test_indices_are_read_in_their_order_and_with_repetitions(tmp_path):
  table = load(tmp_path, json.dumps({"unet": [3, 1, 3], "bert": [0]}))
  assert table["unet"].dtype == np.int64
  np.testing.assert_array_equal(validation_indices.select(table, "unet", 4), [3, 1, 3])
  np.testing.assert_array_equal(validation_indices.select(table, "bert", 1), [0])


def test_a_missing_file_names_the_flag(tmp_path):
  with pytest.raises(FileNotFoundError, match="nlp_default.json is missing: eval.indic"):
    validation_indices.load(str(tmp_path), "nlp", "default")


@pytest.mark.parametrize("text", [
    "{", "[1, 2]", "3", '{"a": []}',
    '{"a": "b"}', '{"a": [1.5]}', '{"a": [true]}', '{"a": [[1], [2]]}',
    '{"a": [[1], 2]}', '{"a": 7}', '{"a": [99999999999999999999]}', '{"a": null}',
])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
  with pytest.raises(ValueError, match="xla_random.json is not a table of configuration numbers"):
    load(tmp_path, text)


@pytest.mark.parametrize("ids, problem", [
    ([0, 4], "validation index 4 of unet, which has 4"),
    ([-1, 2], "validation index -1 of unet, which has 4"),
])
def test_numbers_that_do_not_fit_the_graph_are_refused(tmp_path, ids, problem):
  table = load(tmp_path, json.dumps({"unet": ids}))
  with pytest.raises(ValueError, match=problem):
    validation_indices.select(table, "unet", 4)


def test_a_graph_that_is_not_named_is_refused(tmp_path):
  table = load(tmp_path, '{"unet": [1]}')
  with pytest.raises(ValueError, match="do not name graph bert; leave eval.indices_dir"):
    validation_indices.select(table, "bert", 4)


@recorded.needs_indices
@pytest.mark.parametrize("source, graphs", [("xla", 7), ("nlp", 20)])
@pytest.mark.parametrize("search", ["random", "default"])
def test_published_files_name_a_thousand_configurations_per_graph(source, search, graphs):
  table = validation_indices.load(str(recorded.INDICES), source, search)
  assert len(table) == graphs
  for name in table:
    assert len(validation_indices.select(table, name, 100_041)) == 1000
