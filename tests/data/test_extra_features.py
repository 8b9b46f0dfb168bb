"""The second block of node features, from a raw protobuf to a trained model."""

from __future__ import annotations

from pathlib import Path
import shutil

import numpy as np
import parts
import pytest

from tpugraphs_jax import hlo
from tpugraphs_jax.data import extra_features, feature_blocks, npz
from tpugraphs_jax.hlo import convert

SAMPLE = Path(__file__).parents[1] / "data/hlo/control_flow.hlo.pb"
TUNING = Path(__file__).parents[1] / "data/hlo/synth_layout_tuning.pb"


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
  np.testing.assert_array_equal(extra_features.read(graph, tmp_path / "extra"), expected)
  shutil.rmtree(tmp_path / "extra")
  with pytest.raises(FileNotFoundError, match="extra_dir"):
    extra_features.read(graph, tmp_path / "extra")


def blocks(kinds, names=("released", "extra")):
  return feature_blocks.NodeFeatures(names, kinds=kinds)


def test_a_transform_may_treat_the_extra_columns_apart():
  graph, extra = featurized()
  joined = extra_features.append(graph, extra.values)
  made = blocks("extra=none,*=minmax")
  made.fit([joined])
  np.testing.assert_array_equal(made(joined).node_feat[:, -46:], extra.values)
  assert made(joined).node_feat[:, :-46].max() <= 1
  with pytest.raises(ValueError, match="extra"):
    blocks("extra=none,*=minmax", ["released"])


def test_a_model_that_saw_them_refuses_graphs_without():
  job = parts.make("layout", **{"data.features": ("released", "extra")})
  graph, extra = featurized()
  with pytest.raises(ValueError, match="140 node features"):
    job.ranker.features.fit([graph])
  job.ranker.features.fit([extra_features.append(graph, extra.values)])
  with pytest.raises(ValueError, match="140 node features"):
    job.ranker.features(graph)
