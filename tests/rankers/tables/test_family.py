"""Score tables take every step of a ranker: train, rank, save, explain, propose."""

import jax
import numpy as np
import pytest

from tests.support import parts, table_cases
import tpugraphs_jax
from tpugraphs_jax import synthetic
from tpugraphs_jax.data import batching, npz, plan
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import training


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A working folder, its config, and the data."""
  folder = tmp_path_factory.mktemp("tables")
  root = synthetic.generate(folder, collections=["layout:xla:random"], limit=4, progress=False)
  fields = parts.TINY | {"model.hidden_dim": 8, "model.num_gnns": 1, "batch.configs": 16}
  config = parts.config_of("layout", "xla-random,tables,ci", data_root=str(root), **fields)
  training.run(config, folder / "run")
  return folder / "run", config, root


def graphs_of(root, split):
  return [npz.read_layout(path) for path in npz.split_files(root, "layout:xla:random", split)]


def test_looked_up_scores_are_those_of_the_model(trained):
  """`score` takes all programs at once, the model one program with all configurations."""
  workdir, _, root = trained
  ranker = Ranker.load(workdir)
  graphs = graphs_of(root, "valid")
  prepared = [ranker.prepare(graph) for graph in graphs]
  found = ranker.family.scores(ranker.params, prepared)
  (budget,) = plan.choose_budgets(
    [batching.total_sizes([graph]) for graph in prepared], max_budgets=1
  )
  most = max(len(graph.configs) for graph in prepared)
  apply = jax.jit(ranker.family.network.apply)
  for graph, scores in zip(prepared, found):
    configs = len(graph.configs)
    batch = ranker.family.assemble(
      [Slate(graph, np.arange(configs), np.zeros(configs, np.float32))],
      budget,
      graphs=1,
      configs=most,
    )
    expected = apply({"params": ranker.params}, batch)[0][:configs]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4 * np.ptp(expected))


def test_chosen_configurations_alone_have_the_same_scores(trained):
  workdir, _, root = trained
  ranker = Ranker.load(workdir)
  graph = ranker.prepare(graphs_of(root, "valid")[0])
  (everything,) = ranker.family.scores(ranker.params, [graph])
  ids = np.array([5, 0, 5, 3])
  (some,) = ranker.family.scores(ranker.params, [graph], [ids])
  np.testing.assert_array_equal(some, everything[ids])
  assert ranker.family.scores(ranker.params, []) == []


@pytest.mark.parametrize("config_nodes", [[], [3]])
def test_programs_with_nothing_or_one_to_choose_are_scored(config_nodes):
  program = table_cases.program(0, config_nodes=config_nodes, configs=3)
  prepared = table_cases.prepared(program)
  experiment = parts.make("layout", "tables,ci", **{"model.hidden_dim": 4, "model.num_gnns": 1})
  (budget,) = plan.choose_budgets([prepared.sizes])
  family = experiment.ranker.family
  slate = Slate(prepared, np.arange(1), np.zeros(1, np.float32))
  batch = family.assemble([slate], budget, graphs=1, configs=1)
  params = parts.params_of(family.network, batch)
  (scores,) = family.scores(params, [prepared], [np.arange(3)])
  assert scores.shape == (3,) and np.isfinite(scores).all()
  if not config_nodes:
    np.testing.assert_array_equal(scores, 0)


def test_charges_add_up_to_the_score_and_their_differences_to_its_difference(trained):
  workdir, _, root = trained
  ranker, graph = Ranker.load(workdir), graphs_of(root, "valid")[0]
  (scores,) = ranker.scores([graph])
  rows = ranker.explain(graph, 3)
  assert sum(row.cost for row in rows) == pytest.approx(float(scores[3]), rel=1e-3, abs=1e-3)
  both = ranker.explain(graph, 3, against=5)
  for found in (rows, both):
    sizes = [abs(row.change) for row in found]
    assert sizes == sorted(sizes, reverse=True) and min(row.change for row in found) < 0
  difference = sum(row.cost - row.before for row in both)
  assert difference == pytest.approx(float(scores[3] - scores[5]), rel=1e-3, abs=1e-3)
  with pytest.raises(ValueError, match="9999"):
    ranker.explain(graph, 9999)


def test_explanations_of_one_shape_compile_once(trained, caplog):
  workdir, _, root = trained
  ranker, graph = Ranker.load(workdir), graphs_of(root, "valid")[0]
  ranker.explain(graph, 3)
  with jax.log_compiles():
    ranker.explain(graph, 4, against=5)
  assert "Compiling" not in caplog.text


def test_proposals_score_as_they_say_and_no_worse_than_any_given_configuration(trained):
  workdir, _, root = trained
  graph = graphs_of(root, "valid")[0]
  found = tpugraphs_jax.propose(workdir, graph, 4)
  ranker = Ranker.load(workdir)
  (scores,), (given,) = ranker.scores([found.graph]), ranker.scores([graph])
  np.testing.assert_allclose(scores, found.scores, rtol=1e-4, atol=1e-4)
  assert len(np.unique(found.graph.configs.group_row, axis=0)) == 4
  assert found.scores[0] <= given.min() + found.gap + 1e-4
  assert (np.diff(found.scores) >= 0).all() and not found.graph.configs.is_labelled


def test_proposals_near_a_configuration_begin_with_few_changes(trained):
  workdir, _, root = trained
  graph = graphs_of(root, "valid")[0]
  found = tpugraphs_jax.propose(workdir, graph, 6, near=0)
  changed = (found.graph.configs.group_row != graph.configs.group_row[0]).sum(axis=1)
  assert changed[0] == changed.min() >= 1
  free = tpugraphs_jax.propose(workdir, graph, 1)
  assert found.scores.min() == pytest.approx(free.scores[0], rel=1e-6)
  with pytest.raises(ValueError, match="9999"):
    tpugraphs_jax.propose(workdir, graph, 2, near=9999)


def test_a_model_without_tables_proposes_nothing():
  experiment = parts.make("layout")
  with pytest.raises(ValueError, match="SAGE"):
    experiment.ranker.propose(table_cases.program(0))
