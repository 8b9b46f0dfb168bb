"""Times of nodes, kernels and programs, against sums over nodes in plain Python."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from tests.support import commands, parts, random_graphs, table_cases
from tpugraphs_jax import rankers
from tpugraphs_jax.columns import NODE, opcode_ids
from tpugraphs_jax.data import batching, npz
from tpugraphs_jax.graph import KernelTimes
from tpugraphs_jax.rankers.config import Model
from tpugraphs_jax.rankers.tables import batches, terms, times
from tpugraphs_jax.rankers.tables.network import table_sums
from tpugraphs_jax.run import configs

NETWORKS = (times.TimeTables, times.TimeSAGE)
SMALL = dict(op_embed_dim=3, hidden_dim=8, num_gnns=2)


def program(seed, **options):
  """A program whose choices are output orders and whose configurations have kernels."""
  graph = table_cases.program(seed, **options)
  feat = graph.node_feat.copy()
  feat[:, NODE["minor_to_major"]] = [2, 1, 0, 0, 0, 0]
  opcode = graph.node_opcode.copy()
  opcode[graph.config_node] = opcode_ids()["dot"]
  rows = graph.configs.rows.copy()
  rows[:, :6] = -1
  rows[1:, :3] = [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0), (0, 2, 1)]
  graph = dataclasses.replace(graph, node_feat=feat, node_opcode=opcode)
  graph = random_graphs.with_configs(graph, rows=rows)
  rng = np.random.default_rng(seed)
  kernels, configs = 7, len(graph.configs)
  runtime = rng.integers(1, 5_000_000, (configs, kernels)) * (rng.random((configs, kernels)) < 0.7)
  node = np.argwhere(rng.random((kernels - 1, graph.num_nodes)) < 0.3).astype(np.int32)
  of_kernels = KernelTimes(runtime, node)  # the last kernel is of no node
  return dataclasses.replace(graph, configs=dataclasses.replace(graph.configs, kernels=of_kernels))


def prepared(graph):
  blocks = [graph.node_feat, times.own_orders(graph), times.work(graph)]
  feat = np.concatenate([np.log1p(blocks[0]), *blocks[1:]], axis=1)
  made = terms.terms_of(graph, hops=0)
  return batches.prepare(graph, feat, made, describe=times.choice_features, has_kernels=True)


@functools.cache
def three_programs():
  cases = (dict(), dict(nodes=12, edges=8, config_nodes=[1, 2], configs=3), dict(nodes=45))
  return tuple(prepared(program(seed, **case)) for seed, case in enumerate(cases))


def batch_of(numbers=(0, 1, 2), *, spare=0, graphs=3, configs=4):
  programs = three_programs()
  made = table_cases.slates(programs, configs)
  budget = random_graphs.common_budget([batching.total_sizes(programs)], spare=spare)
  budget["choices"] = max(each.sizes["choices"] for each in programs)
  return batches.assemble([made[i] for i in numbers], budget, graphs=graphs, configs=configs)


@functools.cache
def made(network):
  model = network(**SMALL)
  return model, {"params": parts.params_of(model, batch_of())}


@functools.cache
def compiled(network, method, **options):
  return jax.jit(functools.partial(made(network)[0].apply, method=method, **options))


def applied(network, batch, method="__call__", **options):
  return compiled(network, method, **options)(made(network)[1], batch)


def test_operations_and_bytes_are_those_of_the_arrays():
  graph = program(0)
  dims = graph.node_feat[:, NODE["shape"]][:, :3].astype(int).tolist()
  nbytes = [4 * a * math.ceil(b / 8) * 8 * math.ceil(c / 128) * 128 for a, b, c in dims]
  found = np.expm1(times.work(graph))
  for node in range(graph.num_nodes):
    operands = [nbytes[v] for u, v in graph.edge_index.tolist() if u == node]
    np.testing.assert_allclose(found[node, 0], sum(operands), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[node, 1], max(operands, default=0), rtol=1e-4, atol=1e-6)
    assert (found[node, 2] > 1) == (graph.node_opcode[node] == opcode_ids()["dot"])


def test_the_operations_of_a_product_are_two_for_each_multiplication():
  graph = table_cases.program(0, nodes=3, config_nodes=[2])
  feat = graph.node_feat.copy()
  feat[:, NODE["shape"]] = 0
  feat[:, NODE["shape"]][:, :2] = [(24, 40), (40, 56), (24, 56)]
  opcode = np.array([opcode_ids()[name] for name in ("parameter", "parameter", "dot")], np.uint8)
  edges = np.array([[2, 0], [2, 1]], np.int32)
  graph = dataclasses.replace(graph, node_feat=feat, node_opcode=opcode, edge_index=edges)
  np.testing.assert_allclose(np.expm1(times.work(graph)[2, 2]), 2 * 24 * 40 * 56, rtol=1e-4)


def test_a_choice_that_changes_nothing_has_the_features_of_the_compilers_own_order():
  graph = program(0)
  graph = dataclasses.replace(graph, edge_index=np.zeros((0, 2), np.int32))
  node, row = map(np.ravel, np.indices((len(graph.config_node), len(graph.configs.rows))))
  found, own = times.choice_features(graph, node, row), times.own_orders(graph)
  order = graph.configs.rows[row, :3].tolist()
  is_own = np.array([each in ([-1] * 3, [2, 1, 0]) for each in order])
  np.testing.assert_allclose(found[is_own, :-1], own[graph.config_node[node]][is_own], rtol=1e-6)
  assert (found[:, -1] == ~is_own).all() and 0 < is_own.sum() < len(is_own)


def test_a_tensor_of_seven_dimensions_has_features():
  graph = program(0)
  feat = graph.node_feat.copy()
  feat[0, NODE["shape"]][:6], feat[0, NODE["minor_to_major"]] = 2, [6, 5, 4, 3, 2, 1]
  graph = dataclasses.replace(graph, node_feat=feat)
  assert np.isfinite(times.own_orders(graph)).all() and np.isfinite(times.work(graph)).all()


@pytest.mark.parametrize("network", NETWORKS)
def test_the_time_of_a_program_is_the_sum_of_its_nodes_and_of_the_launch(network):
  batch = batch_of()
  scores, of_nodes = (
    applied(network, batch),
    np.asarray(applied(network, batch, "times", train=False)),
  )
  launch = math.exp(made(network)[1]["params"]["launch"])
  start = 0
  for place, one in enumerate(three_programs()):
    end = start + len(one.opcode)
    expected = of_nodes[start:end].sum(axis=(0, 2)) + launch
    np.testing.assert_allclose(scores[place], expected, rtol=1e-5)
    start = end
  assert (of_nodes[:start] > 0).all() and not of_nodes[start:].any()


@pytest.mark.parametrize("network", NETWORKS)
def test_the_time_of_a_kernel_is_the_share_of_its_nodes_in_it(network):
  batch = batch_of()
  of_nodes = np.asarray(applied(network, batch, "times", train=False))[..., 0]
  found = np.asarray(applied(network, batch, "kernels"))
  first = row = 0
  for one, slate in zip(three_programs(), table_cases.slates(three_programs(), 4)):
    kernels = one.configs.kernels
    members = {d: set(kernels.node[kernels.node[:, 0] == d, 1].tolist()) for d in range(7)}
    for column, config in enumerate(slate.config_ids):
      there = [d for d in range(7) if kernels.runtime[config, d]]
      for d in range(7):
        shared = [sum(node in members[other] for other in there) for node in members[d]]
        of_members = of_nodes[first + np.array(list(members[d]), int), column]
        expected = (of_members / np.maximum(shared, 1)).sum() if d in there else 0
        np.testing.assert_allclose(found[row + d, column], expected, rtol=1e-4, atol=1e-6)
        label = kernels.runtime[config, d] / 1e6
        np.testing.assert_allclose(batch.kernels.time[row + d, column], label, rtol=1e-6)
    first, row = first + len(one.opcode), row + 7


@pytest.mark.parametrize("network", NETWORKS)
def test_padding_and_other_slates_change_no_time(network):
  alone = np.concatenate([applied(network, batch_of([i], graphs=1)) for i in range(3)])
  together = applied(network, batch_of(spare=5))
  np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_tables_add_up_to_the_scores():
  batch = batch_of()
  unary, pair, rest = applied(times.TimeTables, batch, "tables")
  assert pair is None
  found = table_sums(unary, pair, batch) + rest[:, None]
  np.testing.assert_allclose(found, applied(times.TimeTables, batch), rtol=1e-5)


def test_charges_are_the_times_of_all_nodes_and_add_up_to_the_score():
  config = configs.load("layout.py:own,times").replace(model=Model("TimeTables", **SMALL))
  family, one = rankers.create(config, ("orders", "work")), three_programs()[0]
  params = made(times.TimeTables)[1]["params"]
  charged = family.charges(params, one, 2)
  place = table_cases.slates([one], 4)[0].config_ids.tolist().index(2)
  score = applied(times.TimeTables, batch_of())[0, place]
  np.testing.assert_allclose(sum(each.cost for each in charged), score, rtol=1e-5)
  assert {each.places[0] for each in charged} == set(range(len(one.opcode)))
  texts = [each.text("node {}".format) for each in charged]
  assert sum(":" not in text for text in texts) >= len(one.opcode) - len(one.choices.node)
  changed = family.charges(params, one, 2, against=0)
  assert changed and all(each.nodes[0] in one.choices.node for each in changed)


def test_states_of_sage_depend_on_the_choices_of_nodes_nearby():
  batch, one = batch_of(), three_programs()[0]
  of_nodes = np.asarray(applied(times.TimeSAGE, batch, "times", train=False))[: len(one.opcode)]
  differs = np.ptp(of_nodes.sum(axis=-1), axis=1) > 1e-6
  in_tables = np.asarray(applied(times.TimeTables, batch, "times", train=False))[: len(one.opcode)]
  of_tables = np.ptp(in_tables.sum(axis=-1), axis=1) > 1e-6
  assert set(np.flatnonzero(of_tables)) <= set(one.choices.node.tolist())
  assert not set(np.flatnonzero(differs)) <= set(one.choices.node.tolist())


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_kernel_times_are_finite(network):
  model, params = made(network)
  batch = batch_of()
  loss = lambda p: model.apply(p, batch, method="kernels").sum()
  grads = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
  assert all(np.isfinite(grad).all() for grad in grads) and any(grad.any() for grad in grads)


def _ranker(network):
  """A ranker of labels by time with random parameters, and a program with times of kernels."""
  path = commands.ROOT / "data/own/npz/layout/own/outputs_v6e/test/generated_test_bilinear_0.npz"
  graph = npz.read_layout(path)
  changes = {f"model.{name}": value for name, value in SMALL.items()}
  experiment = parts.Experiment(
    configs.load("layout.py:own,times").replace(**{"model.name": network.__name__, **changes})
  )
  experiment.fit_transforms([graph])
  ranker, rng = experiment.ranker, np.random.default_rng(0)
  draw = lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32)
  ranker.params = jax.tree.map(draw, ranker.param_shapes(graph))
  return ranker, graph


@pytest.mark.parametrize("network", NETWORKS)
def test_a_ranker_gives_the_times_of_kernels_which_are_parts_of_its_scores(network):
  ranker, graph = _ranker(network)
  (found,), (scores,) = ranker.kernel_times([graph]), ranker.scores([graph])
  there = graph.configs.kernels.runtime[:] > 0
  assert found.shape == there.shape and not found[~there].any() and (found[there] >= 0).any()
  assert (found.sum(axis=1) <= scores * (1 + 1e-5)).all()
  bare = dataclasses.replace(graph, configs=dataclasses.replace(graph.configs, kernels=None))
  with pytest.raises(ValueError, match="has no kernels: label it"):
    ranker.kernel_times([bare])


def test_milliseconds_are_told_where_the_labels_of_a_model_are_times():
  ranker, graph = _ranker(times.TimeTables)
  assert not ranker.predicts_times and "ms" not in str(ranker.explain(graph, 1)).splitlines()[0]
  ranker.about = {"labels": {"config_runtime": "picoseconds, the time"}, "errors": {"program": 0.2}}
  told = str(ranker.explain(graph, 1))
  (scores,) = ranker.scores([graph], [np.array([1])])
  assert f"{1e-3 * scores[0]:.4g} ms, an error of 20% on half of the test programs" in told
  ranker.about = {"labels": {"config_runtime": "nanoseconds of a call"}}
  assert not ranker.predicts_times
