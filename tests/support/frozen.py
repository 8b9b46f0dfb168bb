"""Scores of systems without public code, as they were before each became one file.

`tests/data/systems/SYSTEM.npz` has graphs (`KIND/NUMBER/FIELD`) and cases (`CASE/...`): options of
the network, parameters one after the other, scores, and for each parameter the norm of the
gradient of a weighted sum of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
import json
import math
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import random_graphs, winners
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs
from tpugraphs_jax.rankers import base

CONFIGS = 4  # the first ones of each graph


class Frozen:
  """A case of a file.

  Args:
    system: name of the file.
    case: name of the case.
  """

  def __init__(self, system: str, case: str):
    own = winners.arrays(system, case)
    settings = json.loads(str(own["settings"]))
    self.network = base.create_network(settings["kind"], settings["name"], **settings["options"])
    self.batch = _batch(
      settings["kind"], winners.arrays(system, settings["kind"]), self.network.hops
    )
    shapes = settings["parameters"]
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    flat = {
      path: value.reshape(shapes[path])
      for path, value in zip(shapes, np.split(own["parameters"], ends), strict=True)
    }
    self.params = traverse_util.unflatten_dict(flat, sep="/")
    self.scores, self.weights = own["scores"], own["weights"]
    self.gradient_norms = dict(zip(shapes, own["gradient_norms"], strict=True))

  def check(self) -> None:
    """Asserts that scores and gradients are as they were."""
    mask = self.batch.config_mask

    @jax.jit
    def run(params):
      def weighted(params):
        scores = self.network.apply({"params": params}, self.batch, train=True)
        return jnp.sum(jnp.where(mask, scores, 0) * self.weights), scores

      return jax.grad(weighted, has_aux=True)(params)

    grads, scores = run(self.params)
    largest = np.abs(self.scores[mask]).max()
    np.testing.assert_allclose(
      np.asarray(scores)[mask], self.scores[mask], rtol=0, atol=1e-5 * largest
    )
    norms = {
      path: float(np.linalg.norm(value))
      for path, value in traverse_util.flatten_dict(grads, sep="/").items()
    }
    assert set(norms) == set(self.gradient_norms)
    least = 1e-5 * max(self.gradient_norms.values())  # sums that cancel
    for path, norm in self.gradient_norms.items():
      np.testing.assert_allclose(norms[path], norm, rtol=1e-4, atol=least, err_msg=path)


def _batch(kind: str, arrays: Mapping[str, np.ndarray], hops: int) -> Any:
  """The graphs of a file in one batch, with an empty slate and padding."""
  names = dict.fromkeys(key.split("/")[0] for key in arrays)
  graphs = [_graph(kind, name, winners.under(arrays, name)) for name in names]
  is_layout = kind == "layout"
  prepare = (
    functools.partial(batching.prepare_program, hops=hops) if is_layout else batching.prepare
  )
  prepared = [prepare(graph, graph.node_feat, slots=1) for graph in graphs]
  budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=2)
  slates = []
  for number, graph in enumerate(prepared):
    chosen = np.arange(min(CONFIGS, len(graph.configs)))
    slates.append(Slate(graph, chosen, np.zeros(len(chosen), np.float32), graph_id=number))
  return random_graphs.assemble(slates, budget, graphs=len(graphs) + 1, configs=CONFIGS)


def _graph(kind: str, name: str, arrays: dict[str, np.ndarray]) -> OpGraph:
  fields = winners.under(arrays, "configs")
  configs = (LayoutConfigs if kind == "layout" else TileConfigs)(**fields)
  nodes = (arrays[key] for key in ("node_feat", "node_opcode", "edge_index", "config_node"))
  return random_graphs.of_arrays(name, *nodes, configs)
