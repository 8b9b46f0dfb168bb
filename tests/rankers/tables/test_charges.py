from __future__ import annotations

import numpy as np
import pytest

from tests.support import table_cases
from tpugraphs_jax.rankers import explain
from tpugraphs_jax.rankers.tables import charges
from tpugraphs_jax.rankers.tables.terms import Costs


def case(seed=0):
  """A program, costs of its nodes and pairs, and the scores of all its configurations."""
  program = table_cases.prepared(table_cases.program(seed))
  rng, width = np.random.default_rng(seed), program.terms.choices
  costs = Costs(
    rng.normal(size=(len(program.choices.node), width)),
    rng.normal(size=(len(program.pairs.ends), width, width)),
  )
  unary = np.zeros((program.sizes["groups"], width))
  np.add.at(unary, program.choices.group, costs.unary)
  pair = np.zeros((program.sizes["columns"], width, width))
  turned = program.pairs.is_turned[:, None, None]
  np.add.at(pair, program.pairs.column, np.where(turned, costs.pair.transpose(0, 2, 1), costs.pair))
  return program, costs, program.terms.total(program.configs.group_row, Costs(unary, pair))


@pytest.mark.parametrize("seed", range(4))
def test_charges_add_up_to_the_score(seed):
  program, costs, scores = case(seed)
  for config, score in enumerate(scores):
    found = charges.charges(program, costs, program.configs.group_row[config])
    assert sum(charge.cost for charge in found) == pytest.approx(score)
    assert len(found) == len(costs.unary) + len(costs.pair)


@pytest.mark.parametrize("seed", range(4))
def test_differences_add_up_to_the_difference_of_scores(seed):
  program, costs, scores = case(seed)
  found = charges.charges(program, costs, *program.configs.group_row[[3, 5]])
  assert sum(c.cost - c.before for c in found) == pytest.approx(scores[3] - scores[5])


def test_a_difference_has_only_charges_of_other_choices():
  program, costs, _ = case()
  row = program.configs.group_row[0]
  assert charges.charges(program, costs, row, row) == []
  changed = row.copy()
  changed[0] = next(r for r in program.terms.row_table[0] if r not in (row[0], -1))
  nodes = set(program.choices.node[program.choices.group == 0].tolist())
  for charge in charges.charges(program, costs, changed, row):
    assert nodes & set(charge.nodes[:2])


def test_a_charge_has_the_layouts_of_its_ends():
  program, costs, _ = case()
  rows = program.configs.rows[program.configs.row_id([0])[0]].tolist()
  row_of = dict(zip(program.choices.node.tolist(), map(tuple, rows)))
  for charge in charges.charges(program, costs, program.configs.group_row[0]):
    assert charge.rows == tuple(row_of[node] for node in charge.nodes[: len(charge.rows)])


def test_a_table_names_instructions_and_adds_up_what_it_leaves_out():
  program, costs, scores = case()
  found = charges.charges(program, costs, program.configs.group_row[0])
  explanation = explain.Explanation(found, table_cases.program(0), 0, None)
  first = max(found, key=lambda charge: abs(charge.change)).nodes[0]
  rows = explanation.table(names={first: "convolution.7"}, top=3).rows
  assert len(rows) == 4 and rows[0][1].startswith("convolution.7: ")
  assert rows[-1][1] == f"{len(found) - 3} more"
  assert sum(float(change) for change, *_ in rows) == pytest.approx(scores[0], abs=1e-3)
  assert sum(explanation.by_node().values()) == pytest.approx(scores[0], rel=1e-4)
