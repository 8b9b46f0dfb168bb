"""Every fast path gives the scores, losses and gradients of the plain formulation."""

from __future__ import annotations

import functools
from pathlib import Path
import sys

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_graphs

from tpugraphs_jax import losses as losses_lib
from tpugraphs_jax.data import batching
from tpugraphs_jax.models import layout, tile

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import plain  # pylint: disable=wrong-import-position

GRAPHS, CONFIGS = 3, 4
HOPS = 2
ALL_POOLINGS = ("mean", "sum", "max", "config_mean", "config_sum", "config_max")


def graphs_of_case(case: str) -> list:
  """The programs of one batch; each case is awkward in its own way."""
  rng = np.random.default_rng(len(case))
  make = functools.partial(random_graphs.layout_graph, rng)
  if case == "several":
    return [make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
            make(nodes=1, edges=0, config_nodes=[0], configs=3),
            make(nodes=16, edges=30, config_nodes=[3, 15, 5], configs=2)]
  if case == "unreachable":  # The only configurable node is isolated.
    return [make(nodes=24, edges=40, config_nodes=[23], configs=6)]
  if case == "everywhere":
    return [make(nodes=20, edges=36, config_nodes=rng.permutation(20), configs=5)]
  assert case == "single"
  return [make(nodes=25, edges=44, config_nodes=[24, 7], configs=1)]


CASES = ("several", "unreachable", "everywhere", "single")


@functools.cache
def batches(slots: int) -> dict:
  """Batches of all cases, with and without reuse, in one shape."""
  prepared = {
      (case, reuse): [
          batching.prepare(graph, graph.node_feat, hops=HOPS, slots=slots, reuse=reuse)
          for graph in graphs_of_case(case)]
      for case in CASES for reuse in (True, False)}
  sizes = [batching.total_sizes(graphs) for graphs in prepared.values()]
  budget = random_graphs.common_budget(sizes, spare=2)
  return {
      key: batching.assemble_layout(
          random_graphs.slots_of(graphs, CONFIGS), budget, graphs=GRAPHS, configs=CONFIGS,
          transform=lambda rows: rows.astype(np.float32))
      for key, graphs in prepared.items()}


def init(model, batch, seed=0):
  """Parameters that are all nonzero, biases too."""
  params = jax.eval_shape(model.init, jax.random.key(0), batch)["params"]
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), params)


def results(score):
  """Compiled `(params, batch) -> (scores, loss, gradients)`."""

  def loss(params, batch):
    scores = score(params, batch)
    total, count = losses_lib.listmle(
        scores, jnp.asarray(batch.target), where=jnp.asarray(batch.config_mask))
    return total / count, jnp.where(batch.config_mask, scores, 0)

  def run(params, batch):
    (value, scores), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return scores, value, grads

  return jax.jit(run)


def check_layout(model, plain_score, slot_widths=(1,)):
  params = init(model, batches(slot_widths[0])["several", True])
  expected = {}
  reference = results(plain_score)
  for slots in slot_widths:
    fast = results(lambda p, b: model.apply({"params": p}, b, train=True))
    for (case, reuse), batch in batches(slots).items():
      if case not in expected:
        expected[case] = reference(params, plain.from_layout(batch))
      comparing.assert_trees_close(fast(params, batch), expected[case])


@pytest.mark.parametrize("normalization", ["sym", "asym"])
@pytest.mark.parametrize("dropout", ["fullgraph", "dropout", "backpropdropout"])
def test_res_model_equals_plain(dropout, normalization):
  model = layout.ResModel(
      op_embed_dim=4, hidden_dim=8, num_gnns=HOPS, dropout=dropout,
      adj_normalization=normalization, config_gain=100.0)
  check_layout(model, functools.partial(
      plain.res_model, layers=HOPS, normalization=normalization, dropout=dropout))


def test_sage_equals_plain_with_every_pooling_and_table_width():
  model = layout.SAGE(
      op_embed_dim=4, value_embed_dim=2, hidden_dim=8, num_gnns=HOPS, pooling=ALL_POOLINGS)
  score = functools.partial(plain.layout_sage, layers=HOPS, pooling=ALL_POOLINGS)
  check_layout(model, score, slot_widths=(0, 1, 4))


def test_sage_in_bfloat16_is_near_float32():
  options = dict(op_embed_dim=4, value_embed_dim=2, hidden_dim=8, num_gnns=HOPS)
  batch = batches(1)["several", True]
  params = init(layout.SAGE(**options), batch)
  exact, half = (
      np.asarray(layout.SAGE(**options, dtype=dtype).apply({"params": params}, batch))
      [batch.config_mask] for dtype in (None, jnp.bfloat16))
  assert half.dtype == np.float32
  # bfloat16 keeps 8 bits; rounding errors of a few layers add up.
  np.testing.assert_allclose(half, exact, atol=0.05 * np.abs(exact).max())
  assert np.abs(half - exact).max() > 0, "bfloat16 was not used"


def test_rematerialised_sage_gives_the_same_gradients():
  options = dict(op_embed_dim=4, value_embed_dim=2, hidden_dim=8, num_gnns=HOPS)
  batch = batches(1)["several", True]
  params = init(layout.SAGE(**options), batch)
  plain_result, remat_result = (
      results(lambda p, b, m=layout.SAGE(**options, remat=remat): m.apply({"params": p}, b))(
          params, batch) for remat in (False, True))
  comparing.assert_trees_close(remat_result, plain_result)


def test_tile_early_join_equals_plain():
  rng = np.random.default_rng(0)
  graphs = [random_graphs.tile_graph(rng, nodes=n, edges=e, configs=c)
            for n, e, c in ((12, 20, 7), (1, 0, 2), (6, 9, 3))]
  model = tile.create("EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8)
  expected = None
  for slots in (0, 4):
    prepared = [batching.prepare(g, g.node_feat, slots=slots) for g in graphs]
    budget = random_graphs.common_budget([batching.total_sizes(prepared)], spare=3)
    batch = batching.assemble_tile(
        random_graphs.slots_of(prepared, CONFIGS), budget, graphs=GRAPHS + 1, configs=CONFIGS,
        transform=lambda x: x)
    params = init(model, batch)
    if expected is None:
      expected = results(plain.tile_sage)(params, plain.from_tile(batch))
    fast = results(lambda p, b: model.apply({"params": p}, b, train=True))
    comparing.assert_trees_close(fast(params, batch), expected)
