"""Scores of graphs by their segments: weights, unwritten entries, chunks, refusals."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import segment_cases as cases
from segment_cases import graphs_of, model_of, params_of

from tpugraphs_jax import parallel
from tpugraphs_jax.rankers.segments import batches as batching
from tpugraphs_jax.rankers.segments.batches import Stale
from tpugraphs_jax.rankers.segments.family import READOUT_COLLECTION

CONFIGS = 4


def expected_scores(model, params, values: np.ndarray) -> np.ndarray:
  """Scores `[n]` of readouts `[J, n, P]` that count once each, by definition."""
  toy = cases.ToyModel()
  score = lambda pooled: np.asarray(toy.apply({"params": params}, pooled, method="score"))
  mean = 1 / len(values) if model.aggregation == "mean" else 1
  if model.readout == "scalar":
    return mean * sum(score(value) for value in values)
  return score(mean * values.sum(axis=0))


def training_scores(model, params, batch):
  """What the training step computes on one device."""
  apply = lambda batch: model.apply(
      {"params": params}, batch, train=True, mutable=[READOUT_COLLECTION],
      rngs={"dropout": jax.random.key(0)})[0]
  return np.asarray(apply(batch))


@pytest.mark.parametrize("readout", ["embedding", "scalar"])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_all_segments_fresh_give_the_score_of_the_segmented_graph(readout, aggregation):
  graphs = graphs_of((3, 3, 3))
  model = model_of(readout=readout, aggregation=aggregation, keep=1.0)
  params = params_of(model, graphs)
  slots = [cases.slot(graph, i, [3, 1, 0], [0, 1, 2]) for i, graph in enumerate(graphs)]
  batch = cases.batch_of(slots, graphs=4, configs=CONFIGS, fresh=3)
  trained = training_scores(model, params, batch)
  evaluated = np.asarray(model.apply({"params": params}, batch))
  scored = cases.scores(cases.family_of(model), params, graphs, [s.config_ids for s in slots])
  for i, graph in enumerate(graphs):
    values = cases.readouts(model.model, params, graph, [3, 1, 0])
    expected = expected_scores(model, params, values)
    for scores in (trained[i, :3], evaluated[i, :3], scored[i]):
      np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_segments_without_edges_between_give_the_score_of_the_whole_graph():
  (whole,) = cases.op_graphs(nodes=(20,))
  segment = np.repeat(np.arange(4, dtype=np.int32), 5)
  inner = segment[whole.edge_index[:, 0]] == segment[whole.edge_index[:, 1]]
  whole = whole.__class__(**{**vars(whole), "edge_index": whole.edge_index[inner]})
  model = model_of(aggregation="sum")
  one = cases.segmented(whole, max_nodes=20)
  four = cases.segmented(whole, segment=segment)
  assert len(one.segments) == 1 and len(four.segments) == 4 and four.cut_edges == 0
  params = params_of(model, [four])
  of_one, of_four = cases.scores(cases.family_of(model, segments=3), params, [one, four])
  assert of_one.shape == (5,) and np.ptp(of_one) > 0.01
  np.testing.assert_allclose(of_four, of_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep_unit", ["segment", "entry"])
@pytest.mark.parametrize("segments, fresh, keep", [
    (3, 1, 0.5), (5, 1, 0.5), (5, 2, 0.3), (8, 3, 0.9), (4, 1, 0.0), (4, 2, 1.0), (1, 1, 0.5)])
def test_expected_aggregate_is_the_sum_over_all_segments(keep_unit, segments, fresh, keep):
  draws, configs = 4000, 2
  model = model_of(keep=keep, keep_unit=keep_unit)
  rng = np.random.default_rng(0)
  values = rng.normal(1, 1, (segments, configs, cases.WIDTH)).astype(np.float32)
  chosen = np.stack([rng.permutation(segments)[:fresh] for _ in range(draws)])
  is_fresh = (np.arange(segments) == chosen[..., None]).any(axis=1)  # [draws, J]
  known = np.broadcast_to(~is_fresh[:, None], (draws, configs, segments))
  stale = np.broadcast_to(values.swapaxes(0, 1), (draws, *values.swapaxes(0, 1).shape))
  batch = batching.SegmentBatch(
      fresh=None, fresh_id=chosen, segments=np.full(draws, segments),
      target=np.zeros((draws, configs)), config_mask=None, graph_id=None, config_id=None,
      stale=Stale(stale, known) if keep else None)
  weigh = parallel.pmap(lambda batch: model.apply(
      {}, batch, method="others", rngs={"dropout": jax.random.key(1)}))
  weight, others = (np.asarray(x[0]) for x in weigh(jax.tree.map(lambda x: x[None], batch)))
  aggregate = (weight[..., None] * values[chosen].sum(axis=1) + others).astype(np.float64)
  error = aggregate.std(axis=0) / np.sqrt(draws)
  full = values.sum(axis=0)
  assert (np.abs(aggregate.mean(axis=0) - full) <= 4 * error + 1e-5).all()
  assert error.max() < 0.05 * np.abs(full).max()
  eta = keep + (1 - keep) * segments / fresh
  np.testing.assert_allclose(weight, np.full((draws, configs), eta), rtol=1e-6)
  is_random = 0 < keep < 1 and segments > fresh
  # Entries of a slate are dropped together, unless each is on its own.
  kept_sum = np.einsum("dcp,p->dc", others, np.ones(cases.WIDTH)) if is_random else None
  if is_random and segments - fresh == 2:
    all_dropped = (kept_sum == 0).mean(axis=0)
    np.testing.assert_allclose(all_dropped, (1 - keep) ** 2, atol=0.05)
    together = (kept_sum == 0).all(axis=1).mean()
    power = 2 if keep_unit == "segment" else 4
    np.testing.assert_allclose(together, (1 - keep) ** power, atol=0.05)


@pytest.mark.parametrize("history_init", ["zero", "skip"])
def test_unwritten_entries_behave_as_the_option_says(history_init):
  graphs, keep = graphs_of((5, 5)), 1.0
  model = model_of(keep=keep, history_init=history_init, aggregation="sum")
  params = params_of(model, graphs)
  slots = [cases.slot(graph, i, [2, 0, 4], [1, 3]) for i, graph in enumerate(graphs)]
  batch = cases.batch_of(slots, graphs=2, configs=3, fresh=2)
  rng = np.random.default_rng(3)
  known = rng.random((2, 3, 5)) < 0.5
  known[:, :, [1, 3]] = False  # fresh
  known[0, 0], known[1, 2, [0, 2, 4]] = False, True
  value = rng.normal(size=(2, 3, 5, cases.WIDTH)).astype(np.float32)
  scores = training_scores(model, params, batch._replace(stale=Stale(value, known)))
  for g, c in np.ndindex(2, 3):
    fresh = cases.readouts(model.model, params, graphs[g], slots[g].config_ids)[[1, 3], c]
    eta = 1.0 if history_init == "zero" else (5 - known[g, c].sum()) / 2
    total = eta * fresh.sum(axis=0) + value[g, c][known[g, c]].sum(axis=0)
    expected = expected_scores(model, params, total[None, None])[0]
    np.testing.assert_allclose(scores[g, c], expected, rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_chunks_or_on_other_graphs():
  graphs = graphs_of((3, 4, 5))
  model = model_of()
  params = params_of(model, graphs)
  score = lambda graphs, segments, configs: cases.scores(
      cases.family_of(model, segments=segments, configs=configs), params, graphs)
  together = score(graphs, 2, 2)
  for graph, scores in zip(graphs, together):
    assert scores.shape == (len(graph.configs),) and np.ptp(scores) > 0
    np.testing.assert_allclose(score([graph], 5, 7)[0], scores, rtol=1e-4, atol=1e-5)


def test_more_fresh_segments_than_a_graph_has_are_refused():
  with pytest.raises(ValueError, match="fresh is 4, but graph0 has 3 segment"):
    batching.check(graphs_of((3, 4, 5)), fresh=4)


def test_cut_edges_are_counted_in_the_log(caplog):
  caplog.set_level("INFO")
  graphs = graphs_of((3, 4))
  batching.check(graphs, fresh=1)
  cut = sum(graph.cut_edges for graph in graphs)
  assert 0 < cut == sum(graph.edges for graph in graphs) - sum(
      len(piece.edge_index) for graph in graphs for piece in graph.segments)
  assert f"{cut} of {sum(graph.edges for graph in graphs)} edges" in caplog.text
