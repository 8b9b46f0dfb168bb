"""The second block of node features, from a raw protobuf to a trained model."""

from __future__ import annotations

from pathlib import Path
import shutil

import numpy as np
import pytest

from configs import layout as layout_config
from tpugraphs_jax import hlo
from tpugraphs_jax.data import extra_features, features, npz
from tpugraphs_jax.hlo import convert
from tpugraphs_jax.tasks.layout import LayoutTask

SAMPLE = Path(__file__).parent / "data/hlo/control_flow.hlo.pb"
TUNING = Path(__file__).parent / "data/hlo/synth_layout_tuning.pb"


def featurized():
  graph = hlo.featurize(SAMPLE)
  return graph, hlo.extra_features(graph)


def test_columns_follow_the_released_ones():
  graph, extra = featurized()
  joined = extra_features.append(graph, extra.values)
  np.testing.assert_array_equal(joined.node_feat[:, :140], graph.node_feat)
  np.testing.assert_array_equal(joined.node_feat[:, 140:], extra.values)


def test_values_of_another_graph_are_refused():
  graph, extra = featurized()
  with pytest.raises(ValueError, match="one per node"):
    extra_features.append(graph, extra.values[1:])


def test_the_files_of_convert_are_read_by_graph_name(tmp_path):
  convert.convert([TUNING], tmp_path / "npz", extra_out=tmp_path / "extra", jobs=1)
  (written,) = (tmp_path / "extra").glob("*.npz")
  with np.load(written) as file:
    expected = file["node_extra"]
  graph = npz.read_layout(tmp_path / "npz" / written.name, with_configs=False)
  joined = extra_features.append_from(graph, tmp_path / "extra")
  np.testing.assert_array_equal(joined.node_feat[:, 140:], expected)
  shutil.rmtree(tmp_path / "extra")
  with pytest.raises(FileNotFoundError, match="extra_dir"):
    extra_features.append_from(graph, tmp_path / "extra")


def test_a_transform_may_treat_the_extra_columns_apart():
  kinds = features.parse_kinds("extra=none,*=minmax", features.node_groups(186))
  assert list(kinds[:140]) == ["minmax"] * 140
  assert list(kinds[140:]) == ["none"] * 46
  with pytest.raises(ValueError, match="extra"):
    features.parse_kinds("extra=none,*=minmax", features.node_groups(140))


def test_a_model_sees_them_and_refuses_graphs_without():
  config = layout_config.get_config("xla-random,ci")
  config.data.extra_dir = "extra"
  config.data.feature_transform = "extra=none,*=minmax"
  task = LayoutTask(config)
  graph, extra = featurized()
  joined = extra_features.append(graph, extra.values)
  kinds = features.parse_kinds(config.data.feature_transform, features.node_groups(186))
  task.transforms["node"] = features.fit([joined.node_feat], kinds)
  np.testing.assert_array_equal(task.node_input(joined)[:, -46:], extra.values)
  with pytest.raises(ValueError, match="140 node features"):
    task.node_input(graph)
