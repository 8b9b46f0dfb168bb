"""The score table ranker, against a slow formulation in NumPy of one program at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import comparing, parts, table_cases
from tests.support.table_cases import batch_of
from tpugraphs_jax import losses
from tpugraphs_jax.rankers.tables.network import ScoreTables

CONFIGS = table_cases.CONFIGS
SMALL = dict(op_embed_dim=3, hidden_dim=8, num_gnns=2, rank=3)


@functools.cache
def params(**options):
  return parts.params_of(ScoreTables(**SMALL | options), batch_of())


@functools.cache
def applied(method, **options):
  model = ScoreTables(**SMALL | options)
  return jax.jit(functools.partial(model.apply, method=method))


def scores(made, **options):
  shape = {k: v for k, v in options.items() if k not in ("dtype", "by_bytes")}
  return applied("__call__", **options)({"params": params(**shape)}, made)


class Slow:
  """The model's formulas on one program, node by node."""

  def __init__(self, tree, program, *, rank, pairs="low_rank"):
    self.tree = jax.tree.map(np.asarray, tree)
    self.program, self.rank, self.pairs = program, rank, pairs
    self.x = self.nodes()

  def dense(self, part, name, x):
    layer = self.tree[part][name] if part else self.tree[name]
    return x @ layer["kernel"] + layer.get("bias", 0)

  def nodes(self):
    graph, tree = self.program, self.tree["encoder"]
    table = tree["OpcodeEmbedding_0"]["table"]["embedding"]
    x = table_cases.gelu(
      self.dense("encoder", "input", np.concatenate([graph.feat, table[graph.opcode]], axis=1))
    )
    edges = graph.edge_index.tolist()
    for i in range(SMALL["num_gnns"]):
      total = self.dense("encoder", f"self_{i}", x)
      for side, (to, source) in (("operands", (0, 1)), ("users", (1, 0))):
        sent = self.dense("encoder", f"{side}_{i}", x)
        for node in range(len(x)):
          near = [sent[edge[source]] for edge in edges if edge[to] == node]
          total[node] += np.mean(near, axis=0) if near else 0
      norm = tree[f"norm_{i}"]
      centred = total - total.mean(axis=1, keepdims=True)
      total = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-6)
      x = x + table_cases.gelu(total * norm["scale"] + norm["bias"])
    return x

  def row(self, number):
    values = self.program.configs.rows[number].astype(int)
    order = [
      0 if min(a, b) < 0 else np.sign(a - b)
      for layout in values.reshape(3, 6)
      for a, b in zip(layout, layout[1:])
    ]
    one_hot = np.eye(7)[values + 1].reshape(-1)
    return table_cases.gelu(self.dense("", "row_state", np.concatenate([one_hot, order])))

  def unary(self, node, choice, row):
    """The cost of one node's choice, a row of the dictionary."""
    dense, choices = functools.partial(self.dense, "unary_costs"), self.program.choices
    state = (
      dense("node", self.x[choices.node[node]])
      + dense("mean", self.x.mean(axis=0))
      + dense("feat", choices.feat[node, choice])
      + dense("row", self.row(row))
    )
    cost = dense("cost", table_cases.gelu(dense("state", table_cases.gelu(state))))
    return cost[0] * choices.weight[node] + 0.1 * cost[1]

  def factor(self, part, group, row):
    """Factors `[2, rank]` of one group's choice, as first end and as second."""
    choices = self.program.choices
    members = self.x[choices.node[choices.group == group]]
    mean = np.mean([self.dense(part, "group", x) for x in members], axis=0)
    state = table_cases.gelu(mean + self.dense(part, "row", self.row(row)))
    return self.dense(part, "factor", state).reshape(2, self.rank)

  def pair(self, number, first_row, second_row):
    """Weight and factors `[rank]` of one pair of nodes, whose ends choose these rows."""
    pairs, part = self.program.pairs, "pair_costs"
    ends = pairs.ends[number]
    state = self.dense(part, "feat", pairs.feat[number]) + sum(
      self.dense(part, f"ends_{i}", self.x[node]) for i, node in enumerate(ends)
    )
    state = table_cases.gelu(self.dense(part, "state", table_cases.gelu(state)))
    gate = self.dense(part, "gate", state)
    half = len(gate) // 2
    gate = gate[:half] * pairs.weight[number] + 0.1 * gate[half:]
    group = dict(zip(self.program.choices.node.tolist(), self.program.choices.group.tolist()))
    first = self.factor(part, group[ends[0]], first_row)[0]
    second = self.factor(part, group[ends[1]], second_row)[1]
    return gate, first, second

  def score(self, config):
    configs, choices, pairs = self.program.configs, self.program.choices, self.program.pairs
    chosen = configs.group_row[config]
    code = self.program.terms.encode(chosen[None])[:, 0]
    total = 0.0
    for node, group in enumerate(choices.group):
      total += self.unary(node, code[group], chosen[group])
    group = dict(zip(choices.node.tolist(), choices.group.tolist()))
    for number, (i, j, _) in enumerate(pairs.ends.tolist() if self.pairs != "none" else ()):
      gate, first, second = self.pair(number, chosen[group[i]], chosen[group[j]])
      total += (gate * first * second).sum()
    return 4 * total


@pytest.mark.parametrize("options", [dict(), dict(pairs="none")])
def test_scores_are_the_sums_of_the_costs_of_single_nodes_and_pairs(options):
  found = scores(batch_of(), **options)
  for i, slate in enumerate(table_cases.slates(table_cases.three_programs(), CONFIGS)):
    slow = Slow(params(**options), slate.graph, rank=SMALL["rank"], **options)
    expected = [slow.score(config) for config in slate.config_ids]
    np.testing.assert_allclose(found[i, : len(expected)], expected, rtol=2e-4, atol=2e-4)


def test_padding_changes_neither_scores_nor_gradients():
  model = ScoreTables(**SMALL)

  def loss(params, made):
    found = model.apply({"params": params}, made)
    totals, counts = losses.loss_sums(
      (("ListMLELoss", 1.0),), found, jnp.asarray(made.target), where=made.config_mask
    )
    return losses.combine((("ListMLELoss", 1.0),), totals, counts), found

  grad = jax.jit(jax.grad(loss, has_aux=True))
  (grads, found), (expected_grads, expected) = (
    grad(params(), made)
    for made in (batch_of(spare=7, graphs=6, choices=14, configs=9), batch_of())
  )
  assert np.isfinite(found).all()
  np.testing.assert_allclose(found[:3, :CONFIGS], expected, rtol=1e-5, atol=1e-5)
  comparing.assert_trees_close(grads, expected_grads, 1e-4)


def test_half_precision_gives_nearly_the_same_scores():
  exact, half = scores(batch_of()), scores(batch_of(), dtype="bfloat16")
  assert half.dtype == jnp.float32
  assert float(jnp.abs(half - exact).max()) < 0.05 * float(jnp.abs(exact).max())


def test_without_bytes_all_nodes_and_pairs_weigh_the_same():
  made = batch_of()
  heavier = made._replace(choices=made.choices._replace(weight=3 * made.choices.weight))
  assert jnp.abs(scores(heavier) - scores(made)).max() > 1e-3
  np.testing.assert_array_equal(scores(heavier, by_bytes=False), scores(made, by_bytes=False))
  equal = made._replace(
    choices=made.choices._replace(weight=np.ones_like(made.choices.weight)),
    pairs=made.pairs._replace(weight=np.ones_like(made.pairs.weight)),
  )
  np.testing.assert_allclose(scores(made, by_bytes=False), scores(equal), rtol=1e-5, atol=1e-5)
