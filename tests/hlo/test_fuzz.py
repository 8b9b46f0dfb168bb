"""Damaged bytes give a valid graph or a ValueError, and nothing else."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from tests.support.faults import mutated
from tpugraphs_jax import hlo

_FOLDER = Path(__file__).parents[1] / "data" / "hlo"
_MUTATIONS = 150


def _check(graph):
  assert graph.node_feat.shape == (graph.num_nodes, 140)
  assert np.isfinite(graph.node_feat).all()
  assert graph.node_opcode.max(initial=0) <= 120
  assert graph.edge_index.min(initial=0) >= 0
  assert graph.edge_index.max(initial=-1) < graph.num_nodes
  assert graph.node_splits[-1] == graph.num_nodes


@pytest.mark.parametrize("name", ["fuzz06", "fuzz01", "text_ops1", "convs", "shapes"])
def test_a_damaged_module_gives_a_valid_graph_or_a_value_error(name):
  rng = np.random.default_rng(sum(name.encode()))
  data = (_FOLDER / f"{name}.hlo.pb").read_bytes()
  refused = 0
  for _ in range(_MUTATIONS):
    try:
      graph = hlo.featurize(mutated(data, rng), edge_order="insertion")
    except ValueError:
      refused += 1
      continue
    _check(graph)
    with contextlib.suppress(ValueError):
      assert len(graph.with_layouts(3).configs) >= 1
  assert 0 < refused < _MUTATIONS
