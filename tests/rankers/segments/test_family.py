"""Segments: weights, scores, gradients, devices, and training of the head alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import comparing, parts, segment_cases
from tests.support.segment_cases import graphs_of, model_of, params_of
from tpugraphs_jax.data import plan
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.losses import LossOptions
from tpugraphs_jax.rankers.segments import batches, history
from tpugraphs_jax.rankers.segments.batches import Stale
from tpugraphs_jax.rankers.segments.family import with_history, with_recomputed, without_others
from tpugraphs_jax.train.step import make_train_step, TrainState

CONFIGS = 4
LOSS = LossOptions(losses="MSE:1")
OPTIMIZER = optax.sgd(0.05)


score_of = jax.jit(
  lambda params, pooled: segment_cases.ToyModel().apply({"params": params}, pooled, method="score")
)


def expected_scores(model, params, values: np.ndarray) -> np.ndarray:
  """Scores `[n]` by definition, of readouts `[J, n, P]` with weight 1 each."""
  values, score = np.asarray(values), lambda pooled: np.asarray(score_of(params, pooled))
  mean = 1 / len(values) if model.options.aggregation == "mean" else 1
  if model.options.readout == "scalar":
    return mean * sum(score(value) for value in values)
  return score(mean * values.sum(axis=0))


def training_scores(model, params, batch):
  """Scores `[G, C]` that the training step computes on one device."""
  apply = lambda batch: model.apply(
    {"params": params}, batch, train=True, mutable=["readout"], rngs={"dropout": jax.random.key(0)}
  )[0]
  return np.asarray(jax.jit(apply)(batch))


@pytest.mark.parametrize("readout", ["embedding", "scalar"])
@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_all_segments_fresh_give_the_score_of_the_segmented_graph(readout, aggregation):
  graphs = graphs_of((3, 3, 3))
  model = model_of(readout=readout, aggregation=aggregation, keep=1.0)
  params = params_of(model, graphs)
  slots = [segment_cases.slot(graph, i, [3, 1, 0], [0, 1, 2]) for i, graph in enumerate(graphs)]
  batch = segment_cases.batch_of(slots, graphs=4, configs=CONFIGS, fresh=3)
  trained = training_scores(model, params, batch)
  evaluated = np.asarray(jax.jit(model.apply)({"params": params}, batch))
  scored = segment_cases.scores(
    segment_cases.family_of(model), params, graphs, [s.config_ids for s in slots]
  )
  for i, graph in enumerate(graphs):
    values = segment_cases.readouts(model.model, params, graph, [3, 1, 0])
    expected = expected_scores(model, params, values)
    for scores in (trained[i, :3], evaluated[i, :3], scored[i]):
      np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_segments_without_edges_between_give_the_score_of_the_whole_graph():
  (whole,) = segment_cases.op_graphs(nodes=(20,))
  segment = np.repeat(np.arange(4, dtype=np.int32), 5)
  inner = segment[whole.edge_index[:, 0]] == segment[whole.edge_index[:, 1]]
  whole = dataclasses.replace(whole, edge_index=whole.edge_index[inner])
  model = model_of(aggregation="sum")
  single = segment_cases.segmented(whole, max_nodes=20)
  four = segment_cases.segmented(whole, segment=segment)
  assert len(single.segments) == 1 and len(four.segments) == 4
  params = params_of(model, [four])
  of_one, of_four = segment_cases.scores(
    segment_cases.family_of(model, segments=3), params, [single, four]
  )
  assert of_one.shape == (5,) and np.ptp(of_one) > 0.01
  np.testing.assert_allclose(of_four, of_one, rtol=1e-4, atol=1e-5)


def test_edges_between_segments_are_counted_in_the_log(caplog):
  graphs = segment_cases.op_graphs(nodes=(20, 9))
  segments = [np.arange(len(graph.node_opcode), dtype=np.int32) // 7 for graph in graphs]
  cut = sum(int(np.ptp(s[edge]) > 0) for g, s in zip(graphs, segments) for edge in g.edge_index)
  cases = [segment_cases.segmented(g, segment=s) for g, s in zip(graphs, segments)]
  caplog.set_level("INFO")
  segment_cases.family_of(model_of()).check_graphs(cases)
  edges = sum(graph.num_edges for graph in graphs)
  assert 0 < cut < edges and f"; {cut} of {edges} edges (" in caplog.text


@pytest.mark.parametrize("keep_unit", ["segment", "entry"])
@pytest.mark.parametrize(
  "segments, fresh, keep",
  [(3, 1, 0.5), (5, 1, 0.5), (5, 2, 0.3), (8, 3, 0.9), (4, 1, 0.0), (4, 2, 1.0), (1, 1, 0.5)],
)
def test_expected_aggregate_is_the_sum_over_all_segments(keep_unit, segments, fresh, keep):
  draws, configs = 4000, 2
  model = model_of(keep=keep, keep_unit=keep_unit)
  rng = np.random.default_rng(0)
  values = rng.normal(1, 1, (segments, configs, segment_cases.WIDTH)).astype(np.float32)
  chosen = np.stack([rng.permutation(segments)[:fresh] for _ in range(draws)])
  is_fresh = (np.arange(segments) == chosen[..., None]).any(axis=1)  # [draws, J]
  known = np.broadcast_to(~is_fresh[:, None], (draws, configs, segments))
  stale = np.broadcast_to(values.swapaxes(0, 1), (draws, *values.swapaxes(0, 1).shape))
  batch = batches.SegmentBatch(
    fresh=None,
    fresh_id=chosen,
    segments=np.full(draws, segments),
    target=np.zeros((draws, configs)),
    config_mask=None,
    graph_id=None,
    config_id=None,
    stale=Stale(stale, known) if keep else None,
  )
  weigh = parallel.pmap(
    lambda batch: model.apply({}, batch, method="others", rngs={"dropout": jax.random.key(1)})
  )
  weight, others = (np.asarray(x[0]) for x in weigh(jax.tree.map(lambda x: x[None], batch)))
  aggregate = (weight[..., None] * values[chosen].sum(axis=1) + others).astype(np.float64)
  error = aggregate.std(axis=0) / np.sqrt(draws)
  full = values.sum(axis=0)
  assert (np.abs(aggregate.mean(axis=0) - full) <= 4 * error + 1e-5).all()
  assert error.max() < 0.05 * np.abs(full).max()
  eta = keep + (1 - keep) * segments / fresh
  np.testing.assert_allclose(weight, np.full((draws, configs), eta), rtol=1e-6)
  is_random = 0 < keep < 1 and segments > fresh
  # Entries of a slate are dropped together, or each on its own (`keep_unit`).
  kept_sum = np.einsum("dcp,p->dc", others, np.ones(segment_cases.WIDTH)) if is_random else None
  if is_random and segments - fresh == 2:
    all_dropped = (kept_sum == 0).mean(axis=0)
    np.testing.assert_allclose(all_dropped, (1 - keep) ** 2, atol=0.05)
    together = (kept_sum == 0).all(axis=1).mean()
    power = 2 if keep_unit == "segment" else 4
    np.testing.assert_allclose(together, (1 - keep) ** power, atol=0.05)


def test_unwritten_entries_count_as_zero():
  graphs = graphs_of((5, 5))
  model = model_of(keep=1.0, aggregation="sum")
  params = params_of(model, graphs)
  slots = [segment_cases.slot(graph, i, [2, 0, 4], [1, 3]) for i, graph in enumerate(graphs)]
  batch = segment_cases.batch_of(slots, graphs=2, configs=3, fresh=2)
  rng = np.random.default_rng(3)
  known = rng.random((2, 3, 5)) < 0.5
  known[:, :, [1, 3]] = False  # fresh
  known[0, 0], known[1, 2, [0, 2, 4]] = False, True
  value = rng.normal(size=(2, 3, 5, segment_cases.WIDTH)).astype(np.float32)
  scores = training_scores(model, params, batch._replace(stale=Stale(value, known)))
  for g, c in np.ndindex(2, 3):
    values = segment_cases.readouts(model.model, params, graphs[g], slots[g].config_ids)
    total = np.asarray(values)[[1, 3], c].sum(axis=0) + value[g, c][known[g, c]].sum(axis=0)
    expected = expected_scores(model, params, total[None, None])[0]
    np.testing.assert_allclose(scores[g, c], expected, rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_chunks_or_on_other_graphs():
  graphs = graphs_of((3, 4, 5))
  model = model_of()
  params = params_of(model, graphs)
  score = lambda graphs, segments, configs: segment_cases.scores(
    segment_cases.family_of(model, segments=segments, configs=configs), params, graphs
  )
  together = score(graphs, 2, 2)
  for graph, scores in zip(graphs, together):
    assert scores.shape == (len(graph.configs),) and np.ptp(scores) > 0
    np.testing.assert_allclose(score([graph], 5, 7)[0], scores, rtol=1e-4, atol=1e-5)


def steps_of(model):
  """The step on fresh segments alone, and the step that recomputes the others."""
  step = make_train_step(model, OPTIMIZER, LOSS)
  return step, with_recomputed(step, model, width=segment_cases.WIDTH)


@pytest.mark.parametrize("recompute, devices", [(True, 1), (True, 2), (False, 1)])
def test_gradient_goes_through_the_fresh_segments_alone(recompute, devices, monkeypatch):
  """In `gst` the others count by their current value; in `one` the fresh stand for all."""
  graphs = graphs_of((3, 5), fresh=2)
  model = model_of(keep=1.0 if recompute else 0.0)
  params = params_of(model, graphs)
  slots = [
    segment_cases.slot(graphs[0], 0, [4, 1], [0, 2]),
    segment_cases.slot(graphs[1], 1, [0, 5, 2], [1, 4]),
  ]
  # On two devices the second has fewer other segments than the first.
  shares = [slots] if devices == 1 else [slots[1:], slots[:1]]
  local = jax.local_devices()[:devices]
  monkeypatch.setattr(jax, "local_devices", lambda: local)
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  sizes = dict(graphs=3, configs=CONFIGS, fresh=2, with_others=recompute, room_for=graphs)
  batch = segment_cases.per_device([segment_cases.batch_of(share, **sizes) for share in shares])
  step, recomputed = steps_of(model)
  step = recomputed if recompute else without_others(step)
  state, metrics = step(parts.replicate(TrainState.create(params, OPTIMIZER), devices), batch)

  def loss(params):
    errors = []
    for slot in slots:
      values = segment_cases.readouts(model.model, params, slot.graph, slot.config_ids)
      fresh, others = values[slot.fresh], jax.lax.stop_gradient(values[slot.others])
      total = fresh.sum(axis=0) + others.sum(axis=0)
      if not recompute:
        total = fresh.sum(axis=0) * len(values) / 2
      pooled = total / len(values)
      scores = score_of(params, pooled)
      errors.append(jnp.square(scores - slot.target))
    return jnp.concatenate(errors).mean()

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  assert float(metrics["loss"][0]) == pytest.approx(float(value), rel=1e-4)
  expected = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
  comparing.assert_trees_close(parallel.unreplicate(state.params), expected)
  assert state.extra == ()


def run_on(monkeypatch, folder, devices: int, place: str):
  """Parameters, losses and the table after eight steps with a table."""
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  graphs, model = graphs_of((3, 4, 5)), model_of(keep=0.5)
  keys = history.Keys.of(graphs)
  spec = (keys.entries, segment_cases.WIDTH, "float32")
  table = history.DeviceHistory(*spec) if place == "device" else history.HostHistory(*spec, folder)

  def draw(number, rng, turn):
    graph = graphs[number]
    ids, fresh = rng.permutation(len(graph.configs))[:CONFIGS], [rng.integers(len(graph.segments))]
    return plan.SlateDraft(graph.sizes, lambda: segment_cases.slot(graph, number, ids, fresh))

  batch_plan = plan.BatchPlan(
    graphs, slates_per_step=4, devices=devices, draw=draw, seed=0, epochs=6, slates_per_epoch=8
  )
  sizes = dict(graphs=4 // devices, configs=CONFIGS, fresh=1)
  assemble = lambda slots, budget: batches.assemble(
    slots, budget, **sizes, assemble_layout=segment_cases.assemble_layout
  )
  drawn = plan.training_batches(
    plan.Batches(batch_plan, 12, range(devices), assemble, segment_cases.per_device)
  )
  step = with_history(steps_of(model)[0], table, keys)
  state = parts.replicate(TrainState.create(params_of(model, graphs), OPTIMIZER), devices)
  losses = []
  for _ in range(8):
    state, metrics = step(state, next(drawn))
    losses.append(float(metrics["loss"][0]))
  everything = np.arange(keys.entries)[None].repeat(devices, axis=0)
  return (
    parallel.unreplicate(state.params),
    losses,
    [np.asarray(x)[0] for x in table.read(everything)],
  )


def test_two_devices_equal_one_and_a_host_table_equals_one_on_the_device(monkeypatch, tmp_path):
  params, losses, table = run_on(monkeypatch, tmp_path / "one", 1, "device")
  assert table[1].sum() > 20
  for devices, place in ((2, "device"), (2, "host")):
    other_params, other_losses, other_table = run_on(monkeypatch, tmp_path / place, devices, place)
    comparing.assert_trees_close(other_params, params)
    np.testing.assert_allclose(other_losses, losses, rtol=1e-4)
    np.testing.assert_array_equal(other_table[1], table[1])
    np.testing.assert_allclose(other_table[0], table[0], rtol=1e-3, atol=1e-5)


def test_head_training_leaves_the_backbone_alone_and_sees_exact_readouts(tmp_path):
  graphs = graphs_of((3, 4))
  model = model_of()
  params = params_of(model, graphs)
  family = segment_cases.family_of(model, configs=3)
  head, known = family.sum_readouts(params, graphs, tmp_path / "head")
  ids = [np.arange(len(graph.configs)) for graph in graphs]
  for graph, head_graph, every in zip(graphs, known, ids):
    values = segment_cases.readouts(model.model, params, graph, every).sum(axis=0)
    np.testing.assert_allclose(head_graph.total, values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(head_graph.configs.labels, graph.configs.labels)
  optimizer = head.constrain(optax.sgd(0.1))
  slots = [
    segment_cases.slot(known[0], 0, [4, 2], [0]),
    segment_cases.slot(known[1], 1, [5, 1], [0]),
  ]
  batch = head.assemble(slots, {}, graphs=3, configs=CONFIGS)
  scores = jax.jit(head.network.apply)({"params": params}, batch)
  evaluated = segment_cases.scores(family, params, graphs, [np.array([4, 2]), np.array([5, 1])])
  np.testing.assert_allclose(scores[:2, :2], evaluated, rtol=1e-4, atol=1e-5)
  step = make_train_step(head.network, optimizer, LOSS)
  state = TrainState.create(params, optimizer)
  state, _ = step(
    jax.tree.map(lambda x: jnp.asarray(x)[None], state), jax.tree.map(lambda x: x[None], batch)
  )
  trained = parallel.unreplicate(state.params)
  for name in ("node", "row"):
    jax.tree.map(np.testing.assert_array_equal, trained[name], params[name])
  for name in ("hidden", "out"):
    assert not np.array_equal(trained[name]["kernel"], params[name]["kernel"])
  for used in (params, trained):
    for ours, theirs in zip(
      segment_cases.scores(head, used, graphs, ids), segment_cases.scores(family, used, graphs, ids)
    ):
      np.testing.assert_array_equal(ours, theirs)
  with pytest.raises(AssertionError, match="other programs"):
    segment_cases.scores(head, trained, graphs, [ids[0][:2], ids[1]])
