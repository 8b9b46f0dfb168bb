"""Residuals of score tables against sums over triples of groups, one by one."""

import functools
import itertools

import comparing
import jax
import numpy as np
import pytest
import table_cases

from tpugraphs_jax.data import batching
from tpugraphs_jax.rankers.tables import batches as table_batches
from tpugraphs_jax.rankers.tables.network import ScoreTables
import random_graphs

CONFIGS = 4
SMALL = dict(op_embed_dim=3, hidden_dim=6, num_gnns=1, rank=2)


@functools.cache
def programs():
  cases = (dict(nodes=30, edges=60), dict(nodes=12, edges=8, config_nodes=[1], configs=3),
           dict(nodes=40, edges=100, rows=9))
  return tuple(table_cases.prepared(table_cases.program(i, **case)) for i, case in enumerate(cases))


def batch(order=(0, 1, 2), *, spare=0, graphs=3, configs=CONFIGS):
  slates = table_cases.slates(programs(), CONFIGS)
  sizes = batching.total_sizes(programs())
  budget = random_graphs.common_budget([sizes], spare=spare) | {"choices": sizes["choices"]}
  return table_batches.assemble(
      [slates[i] for i in order], budget, graphs=graphs, configs=configs)


@functools.cache
def model_and_params(residual):
  model = ScoreTables(**SMALL, residual=residual)
  drawn = jax.jit(model.init)(jax.random.key(0), batch())["params"]
  rng = np.random.default_rng(1)  # biases begin at 0: no test should rest on that
  return model, jax.tree.map(
      lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), drawn)


@functools.cache
def applied(residual, method):
  model, _ = model_and_params(residual)
  return jax.jit(functools.partial(model.apply, method=method))


def residuals(residual, made):
  return applied(residual, "residuals")({"params": model_and_params(residual)[1]}, made)


def gelu(x):
  return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Slow:
  """The residuals of one program, group by group, from node and row states."""

  def __init__(self, residual, program):
    model, params = model_and_params(residual)
    self.program, self.tree = program, jax.tree.map(np.asarray, params["beyond"])
    (number,) = [i for i, other in enumerate(programs()) if other is program]
    made = batch(order=(number,), graphs=1)
    x, row = model.apply({"params": params}, made, False, method="states")
    self.x, self.row = np.asarray(x), np.asarray(row)

  def dense(self, *path_and_x):
    *path, x = path_and_x
    layer = functools.reduce(lambda tree, name: tree[name], path, self.tree)
    return x @ layer["kernel"] + layer.get("bias", 0)

  def state(self, group, choice):
    choices = self.program.choices
    mine = np.flatnonzero(choices.group == group)
    node = np.mean([self.dense("states", "node", self.x[choices.node[i]]) for i in mine], axis=0)
    feat = np.mean([choices.feat[i, choice] for i in mine], axis=0)
    return gelu(node + self.dense("states", "feat", feat)
                + self.dense("states", "row", self.row[group, choice]))

  def neighbours(self, name):
    """Of each group its (neighbour, weight) along every column."""
    pairs, found = self.program.pairs, {}
    for number, (g, h) in enumerate(pairs.groups.tolist()):
      if g == h:
        continue
      weight = 0
      for i in np.flatnonzero(pairs.column == number):
        state = gelu(self.dense(name, "feat", pairs.feat[i]) + sum(
            self.dense(name, f"end_{k}", self.x[pairs.ends[i, k]]) for k in range(3)))
        scaled, flat = np.split(self.dense(name, "weight", state), 2)
        weight = weight + scaled * pairs.weight[i] + 0.1 * flat
      found.setdefault(g, []).append((h, weight))
      found.setdefault(h, []).append((g, weight))
    return found

  def triples(self, code):
    half = lambda group, part: np.split(
        self.dense("factors", self.state(group, code[group])), 2)[part]
    total = 0.0
    for middle, around in self.neighbours("weights").items():
      for (a, wa), (b, wb) in itertools.combinations(around, 2):
        total += (half(middle, 1) * wa * half(a, 0) * wb * half(b, 0)).sum()
    return 4 * total

  def sage(self, code):
    groups, choices = range(self.program.sizes["groups"]), self.program.choices
    state = [self.state(g, code[g]) for g in groups]
    for i in range(2):
      near, after = self.neighbours(f"weights_{i}"), []
      sent = [self.dense(f"sent_{i}", s) for s in state]
      for g in groups:
        around = near.get(g, [])
        mean = sum(w * sent[h] for h, w in around) / max(len(around), 1)
        total = self.dense(f"self_{i}", state[g]) + mean
        norm = self.tree[f"norm_{i}"]
        total = (total - total.mean()) / np.sqrt(total.var() + 1e-6)
        after.append(state[g] + gelu(total * norm["scale"] + norm["bias"]))
      state = after
    cost = 0.0
    for g in groups:
      scaled, flat = self.dense("cost", state[g])
      cost += scaled * choices.weight[choices.group == g].sum() + 0.1 * flat
    return 4 * cost


@pytest.mark.parametrize("residual", ["triples", "sage"])
def test_residuals_are_sums_over_groups(residual):
  found = residuals(residual, batch())
  for i, slate in enumerate(table_cases.slates(programs(), CONFIGS)):
    slow = Slow(residual, slate.graph)
    code = slate.graph.terms.encode(slate.graph.configs.group_row[slate.config_ids])
    expected = [getattr(slow, residual)(code[:, c]) for c in range(code.shape[1])]
    scale = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(found[i, : len(expected)], expected, rtol=1e-3, atol=1e-3 * scale)


def test_one_group_alone_has_no_triples():
  np.testing.assert_allclose(residuals("triples", batch())[1], 0, atol=1e-6)


@pytest.mark.parametrize("residual", ["triples", "sage"])
@pytest.mark.parametrize("changes", [dict(spare=5), dict(graphs=5), dict(configs=7)])
def test_padding_does_not_change_residuals(residual, changes):
  found, expected = residuals(residual, batch(**changes)), residuals(residual, batch())
  np.testing.assert_allclose(found[:3, :CONFIGS], expected, rtol=1e-4, atol=1e-5)
  assert np.isfinite(found).all()


@pytest.mark.parametrize("residual", ["triples", "sage"])
def test_a_score_is_the_sum_of_tables_and_residual(residual):
  params, made = {"params": model_and_params(residual)[1]}, batch()
  scores = applied(residual, "__call__")(params, made)
  bare = ScoreTables(**SMALL).apply(
      {"params": {k: v for k, v in params["params"].items() if k != "beyond"}}, made)
  np.testing.assert_allclose(scores, bare + residuals(residual, made), rtol=1e-4, atol=1e-4)


def test_padding_gives_the_residual_no_gradient():
  model, params = model_and_params("triples")
  total = lambda params, made: (
      model.apply({"params": params}, made, method="residuals") * made.config_mask).sum()
  grad = jax.jit(jax.grad(total))
  comparing.assert_trees_close(
      grad(params, batch(spare=5, graphs=4, configs=8)), grad(params, batch()), 1e-4)


def test_an_unknown_residual_is_refused():
  with pytest.raises(ValueError, match="residual is 'gat', expected one of none, triples, sage"):
    ScoreTables(residual="gat")
