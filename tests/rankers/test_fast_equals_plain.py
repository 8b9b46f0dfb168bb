"""Every fast path gives the scores, losses and gradients of the plain formulation."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from tests.support import comparing, parts, plain, random_graphs, system_cases
from tpugraphs_jax import losses
from tpugraphs_jax.data import batching
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.train.step import apply_in_chunks

GRAPHS, CONFIGS = 3, 4
HOPS = 2
ALL_POOLINGS = ("mean", "sum", "max", "config_mean", "config_sum", "config_max")


def graphs_of_case(case: str) -> list:
  """The programs of one batch; each case is awkward in its own way."""
  rng = np.random.default_rng(len(case))
  make = functools.partial(random_graphs.layout_graph, rng)
  if case == "several":
    return [
      make(nodes=9, edges=14, config_nodes=[2, 0], configs=7),
      make(nodes=1, edges=0, config_nodes=[0], configs=3),
      make(nodes=16, edges=30, config_nodes=[3, 15, 5], configs=2),
    ]
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
      random_graphs.prepare(graph, hops=HOPS, slots=slots, reuse=reuse)
      for graph in graphs_of_case(case)
    ]
    for case in CASES
    for reuse in (True, False)
  }
  sizes = [batching.total_sizes(graphs) for graphs in prepared.values()]
  budget = random_graphs.common_budget(sizes, spare=2)
  return {
    key: random_graphs.assemble(
      random_graphs.slots_of(graphs, CONFIGS), budget, graphs=GRAPHS, configs=CONFIGS
    )
    for key, graphs in prepared.items()
  }


@jax.jit
def loss_and_gradient(scores, target, mask):
  """ListMLE and its gradient with respect to scores; compiled once for all models."""

  def loss(scores):
    total, count = losses.listmle(scores, target, where=mask)
    return total / count

  return jax.value_and_grad(loss)(scores)


def results(score):
  """Function `(params, batch) -> (scores, loss, gradients)`."""

  @jax.jit
  def scores_and_pullback(params, batch, cotangent):
    scores, pullback = jax.vjp(lambda params: score(params, batch), params)
    return scores, pullback(cotangent)[0]

  def run(params, batch):
    none = np.zeros(batch.target.shape, np.float32)
    scores, _ = scores_and_pullback(params, batch, none)
    loss, cotangent = loss_and_gradient(scores, batch.target, batch.config_mask)
    _, grads = scores_and_pullback(params, batch, cotangent)
    return np.where(batch.config_mask, scores, 0), loss, grads

  return run


@functools.cache
def plain_results(name, **options):
  """`results` of a plain network, compiled once."""
  return results(functools.partial(getattr(plain, name), **options))


def check_layout(model, reference, slot_widths=(1,)):
  """`model` gives the results of `reference` in every case and table width."""
  params = parts.params_of(model, batches(slot_widths[0])["several", True])
  expected = {
    case: reference(params, plain.from_layout(batch))
    for (case, reuse), batch in batches(slot_widths[0]).items()
    if reuse
  }
  fast = results(lambda params, batch: model.apply({"params": params}, batch, train=True))
  for slots in slot_widths:
    for (case, _), batch in batches(slots).items():
      comparing.assert_trees_close(fast(params, batch), expected[case])


@pytest.mark.parametrize(
  "dropout, layers, normalization, remat",
  [
    ("dropout", 1, "asym", False),
    ("backpropdropout", HOPS, "sym", True),
  ],  # test_official_parity has the others
)
def test_res_model_equals_plain(dropout, layers, normalization, remat):
  options = dict(num_gnns=layers, dropout=dropout, adj_normalization=normalization, remat=remat)
  model = res_model.ResModel(op_embed_dim=4, hidden_dim=8, **options)
  reference = plain_results(
    "res_model", layers=layers, normalization=normalization, dropout=dropout
  )
  check_layout(model, reference, slot_widths=(0, 4) if dropout == "dropout" else (1,))


SAGE_OPTIONS = dict(
  op_embed_dim=4, value_embed_dim=2, hidden_dim=8, num_gnns=HOPS, pooling=ALL_POOLINGS
)


def test_sage_equals_plain_with_every_pooling_and_table_width():
  reference = plain_results("layout_sage", layers=HOPS, pooling=ALL_POOLINGS)
  check_layout(sage.SAGE(**SAGE_OPTIONS), reference, slot_widths=(0, 4))


def test_recomputed_chunks_of_configurations_equal_plain():
  model = sage.SAGE(**SAGE_OPTIONS, remat=True)
  params = parts.params_of(model, batches(1)["several", True])
  whole = plain_results("layout_sage", layers=HOPS, pooling=ALL_POOLINGS)
  chunked = results(
    lambda params, batch: apply_in_chunks(
      model, {"params": params}, batch, config_chunk=CONFIGS // 2, train=True, mutable=["activity"]
    )[0]
  )
  for case in CASES:
    batch = batches(1)[case, True]
    comparing.assert_trees_close(chunked(params, batch), whole(params, plain.from_layout(batch)))


@pytest.mark.parametrize(
  "kind, name, options",
  [
    ("layout", "SAGE", SAGE_OPTIONS),
    ("layout", "ResModel", dict(adj_normalization="sym")),
    ("tile", "EarlyJoinSAGE", {}),
    ("tile", "EarlyJoinResGCN", {}),
  ],
)
def test_models_in_bfloat16_are_near_float32(kind, name, options):
  """They give float32 scores."""
  make = functools.partial(
    base.create_network, kind, name, **dict(op_embed_dim=4, hidden_dim=8) | options
  )
  batch = system_cases.TILES if kind == "tile" else batches(1)["several", True]
  params = parts.params_of(make(), batch)
  score = lambda model: np.asarray(jax.jit(model.apply)({"params": params}, batch))[
    batch.config_mask
  ]
  exact, half = score(make()), score(make(dtype="bfloat16"))
  assert half.dtype == np.float32
  # bfloat16 keeps 8 bits; rounding errors of a few layers add up.
  np.testing.assert_allclose(half, exact, atol=0.05 * np.abs(exact).max())
  assert np.abs(half - exact).max() > 1e-5 * np.abs(exact).max(), "bfloat16 was not used"
