"""Training on segments: gradients, resuming, devices, the head alone."""

from __future__ import annotations

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import segment_cases as cases
from segment_cases import graphs_of, model_of, params_of

from tpugraphs_jax import losses as losses_lib, parallel
from tpugraphs_jax.data import plan
from tpugraphs_jax.rankers.segments import batches as batching, family as family_lib, history
from tpugraphs_jax.rankers.segments.family import READOUT_COLLECTION
from tpugraphs_jax.train import loop, state as state_lib, step as step_lib

CONFIGS = 4
LOSSES = losses_lib.parse_losses("MSE:1")
OPTIMIZER = optax.sgd(0.05)


def steps_of(model, *, width: int = cases.WIDTH):
  """The step without others, and one that recomputes them."""
  step = step_lib.make_train_step(
      model, OPTIMIZER, step_lib.Objective(LOSSES), collections=(READOUT_COLLECTION,))
  return step, family_lib.with_recomputed(step, model, width=width)


def on_devices(params, devices: int):
  repeat = lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], devices, axis=0)
  return jax.tree.map(repeat, state_lib.TrainState.create(params, OPTIMIZER))


@pytest.mark.parametrize("recompute, devices", [(True, 1), (True, 2), (False, 1)])
def test_gradient_goes_through_the_fresh_segments_alone(recompute, devices, monkeypatch):
  """`gst`: the others count by their current value; `one`: the fresh stand for all."""
  graphs = graphs_of((3, 5), fresh=2)
  model = model_of(keep=1.0 if recompute else 0.0)
  params = params_of(model, graphs)
  slots = [cases.slot(graphs[0], 0, [4, 1], [0, 2]), cases.slot(graphs[1], 1, [0, 5, 2], [1, 4])]
  # On two devices the second has fewer other segments than the first.
  shares = [slots] if devices == 1 else [slots[1:], slots[:1]]
  monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
  batch = cases.per_device([
      cases.batch_of(share, graphs=3, configs=CONFIGS, fresh=2, with_others=recompute,
                     room_for=graphs) for share in shares])
  step, recomputed = steps_of(model)
  step = recomputed if recompute else family_lib.without_others(step)
  state, metrics = step(on_devices(params, devices), batch)

  def loss(params):
    errors = []
    for slot in slots:
      values = _readouts(params, slot.graph, slot.config_ids)
      fresh, others = values[slot.fresh], jax.lax.stop_gradient(values[slot.others])
      total = fresh.sum(axis=0) + others.sum(axis=0)
      if not recompute:
        total = fresh.sum(axis=0) * len(values) / 2
      pooled = total / len(values)
      scores = cases.ToyModel().apply({"params": params}, pooled, method="score")
      errors.append(jnp.square(scores - slot.target))
    return jnp.concatenate(errors).mean()

  value, grads = jax.value_and_grad(loss)(params)
  assert float(metrics["loss"][0]) == pytest.approx(float(value), rel=1e-4)
  expected = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
  comparing.assert_trees_close(parallel.unreplicate(state.params), expected)
  assert state.extra == ()


def _readouts(params, graph, ids):
  """As `cases.readouts`, differentiable."""
  toy, budget, values = cases.ToyModel(), cases.budget_for([graph], 1), []
  for piece in graph.segments:
    slot = batching.Slate(piece, np.asarray(ids), np.zeros(len(ids), np.float32))
    batch = cases.assemble_layout([slot], budget, graphs=1, configs=len(ids))
    values.append(toy.apply({"params": params}, batch, method="embed")[0])
  return jnp.stack(values)


class Job:
  """A few training steps with a table, as a task would set them up."""

  def __init__(self, place: str, folder, *, keep: float = 0.5, graphs=None, steps: int = 12):
    self.graphs = graphs or graphs_of((3, 4, 5))
    self.model = model_of(keep=keep)
    self.keys = history.Keys.of(self.graphs)
    self.table = history.create(
        self.keys, width=cases.WIDTH, dtype="float32", place=place, folder=folder)
    self.plan = plan.BatchPlan(
        self.graphs, slates_per_step=4, devices=parallel.local_device_count(),
        draw=self.draw, seed=0, epochs=6, slates_per_epoch=8)
    devices = parallel.local_device_count()
    assemble = lambda slots, budget: batching.assemble(
        slots, budget, graphs=4 // devices, configs=CONFIGS, fresh=1,
        assemble_layout=cases.assemble_layout)
    batches = plan.training_batches(
        plan.Batches(self.plan, steps, range(devices), assemble, cases.per_device))
    self.batches = history.BatchesWithHistory(
        batches, history.Snapshots(folder, self.keys, self.table))
    step, _ = steps_of(self.model)
    self.step = family_lib.with_history(step, self.table, self.keys)
    self.params = params_of(self.model, self.graphs)

  def draw(self, number, rng):
    graph = self.graphs[number]
    ids = rng.permutation(len(graph.configs))[:CONFIGS]
    fresh = [rng.integers(len(graph.segments))]
    return plan.Drawn(graph.sizes, lambda: cases.slot(graph, number, ids, fresh))

  def contents(self):
    everything = np.arange(self.keys.entries)[None].repeat(
        parallel.local_device_count(), axis=0)
    return [np.asarray(x)[0] for x in self.table.read(everything)]

  def train(self, workdir, *, epochs: int, resume: bool = False):
    experiment = loop.Experiment(self.step, self.batches, lambda params: {"opa": 0.0})
    return loop.train(
        state_lib.TrainState.create(self.params, OPTIMIZER), experiment,
        loop.Schedule(total_epochs=epochs, steps_per_epoch=2), workdir, resume=resume)


@pytest.mark.parametrize("place", ["device", "host"])
def test_resumed_training_equals_training_without_a_stop_bit_for_bit(place, tmp_path):
  whole = Job(place, tmp_path / "whole" / "history")
  expected = whole.train(tmp_path / "whole", epochs=5)
  Job(place, tmp_path / "parts" / "history").train(tmp_path / "parts", epochs=2)
  later = Job(place, tmp_path / "parts" / "history")
  assert not later.contents()[1].any()
  result = later.train(tmp_path / "parts", epochs=5, resume=True)
  assert result.step == 10
  jax.tree.map(np.testing.assert_array_equal, result.state, expected.state)
  for array, other in zip(later.contents(), whole.contents()):
    np.testing.assert_array_equal(array, other)
  assert whole.contents()[1].any() and not whole.contents()[1].all()


def run_on(monkeypatch, tmp_path, devices: int, place: str):
  with monkeypatch.context() as patch:
    patch.setattr(parallel, "local_device_count", lambda: devices)
    job = Job(place, tmp_path / f"{place}{devices}")
    state, losses = on_devices(job.params, devices), []
    for _ in range(8):
      state, metrics = job.step(state, next(job.batches))
      losses.append(float(metrics["loss"][0]))
    return parallel.unreplicate(state.params), losses, job.contents()


def test_two_devices_equal_one_and_a_host_table_equals_one_on_the_device(monkeypatch, tmp_path):
  params, losses, table = run_on(monkeypatch, tmp_path, 1, "device")
  assert table[1].sum() > 20
  for devices, place in ((2, "device"), (2, "host")):
    other_params, other_losses, other_table = run_on(monkeypatch, tmp_path, devices, place)
    comparing.assert_trees_close(other_params, params)
    np.testing.assert_allclose(other_losses, losses, rtol=1e-4)
    np.testing.assert_array_equal(other_table[1], table[1])
    np.testing.assert_allclose(other_table[0], table[0], rtol=1e-3, atol=1e-5)


def test_head_training_leaves_the_backbone_alone_and_sees_exact_readouts(tmp_path):
  graphs = graphs_of((3, 4))
  model = model_of()
  params = params_of(model, graphs)
  family = cases.family_of(model, configs=3)
  ids = [np.array([0, 2, 3, 4]), np.array([5, 1])]
  known = family_lib.refresh(family, params, graphs, ids, tmp_path / "head")
  for graph, head_graph, chosen in zip(graphs, known, ids):
    values = cases.readouts(model.model, params, graph, chosen).sum(axis=0)
    np.testing.assert_allclose(head_graph.total, values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        head_graph.configs.runtime_ns, graph.configs.runtime_ns[chosen])
  head = family_lib.Head(family)
  optimizer = head.optimizer(optax.sgd(0.1))
  slots = [cases.slot(known[0], 0, [3, 1], [0]), cases.slot(known[1], 1, [0, 1], [0])]
  batch = head.assemble(slots, {}, graphs=3, configs=CONFIGS)
  scores = head.network.apply({"params": params}, batch)
  evaluated = cases.scores(family, params, graphs, [np.array([4, 2]), np.array([5, 1])])
  np.testing.assert_allclose(scores[:2, :2], evaluated, rtol=1e-4, atol=1e-5)
  step = step_lib.make_train_step(head.network, optimizer, step_lib.Objective(LOSSES))
  state = state_lib.TrainState.create(params, optimizer)
  state, _ = step(jax.tree.map(lambda x: jnp.asarray(x)[None], state),
                  jax.tree.map(lambda x: x[None], batch))
  trained = parallel.unreplicate(state.params)
  for name in ("node", "row"):
    jax.tree.map(np.testing.assert_array_equal, trained[name], params[name])
  for name in ("hidden", "out"):
    assert not np.array_equal(trained[name]["kernel"], params[name]["kernel"])
  for used in (params, trained):
    for ours, theirs in zip(cases.scores(head, used, graphs, ids),
                            cases.scores(family, used, graphs, ids)):
      np.testing.assert_array_equal(ours, theirs)
