"""The training step: its formulas, devices, chunks, padding and random stream."""

from __future__ import annotations

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import comparing, parts, random_graphs
from tpugraphs_jax import losses
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.plan import Batches, BatchPlan, draw_slates
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.optimizer import clip_by_variable_norm, variable_norms
from tpugraphs_jax.rankers import base
from tpugraphs_jax.train.step import make_train_step, TrainState

GRAPHS, CONFIGS, SLOTS = 6, 4, 8
KERNEL_L2, ACTIVITY_L2, TEMPERATURE = 0.01, 0.3, 2.0
MAX_NORM = 0.05
LOSSES = "ListMLELoss:3,MSE:1"
MODEL = base.create_network("tile", "EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8, num_gnns=1)
OPTIMIZER = optax.chain(clip_by_variable_norm(MAX_NORM), optax.sgd(1.0))


def slots() -> list[batching.Slate]:
  rng = np.random.default_rng(0)
  graphs = [
    random_graphs.tile_graph(rng, nodes=4 + 3 * i, edges=6 * i, configs=2 + i)
    for i in range(GRAPHS)
  ]
  prepared = [batching.prepare(g, g.node_feat, slots=2) for g in graphs]
  return random_graphs.slots_of(prepared, CONFIGS)


def device_batches(devices: int) -> list:
  """The slates spread unevenly over devices, each with room for `SLOTS / devices`."""
  shares = [[slots()[i] for i in part] for part in np.array_split(np.arange(GRAPHS), devices)]
  sizes = [batching.total_sizes([slot.graph for slot in share]) for share in shares]
  budget = random_graphs.common_budget(sizes, spare=2)
  return [
    random_graphs.assemble(share, budget, graphs=SLOTS // devices, configs=CONFIGS)
    for share in shares
  ]


def init_params():
  return parts.params_of(MODEL, device_batches(1)[0], seed=1)


def make_step(**options):
  loss = losses.LossOptions(
    losses=LOSSES, temperature=TEMPERATURE, kernel_l2=KERNEL_L2, activity_l2=ACTIVITY_L2
  )
  return make_train_step(MODEL, OPTIMIZER, loss, clip_lookups=True, **options)


@pytest.fixture(scope="module")
def train_step():
  return make_step()


def take_step(train_step, batches, steps: int = 1):
  """Parameters and metrics after steps on as many devices as there are batches."""
  state = parts.replicate(TrainState.create(init_params(), OPTIMIZER), len(batches))
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
  for _ in range(steps):
    state, metrics = train_step(state, stacked)
  return parallel.unreplicate(state.params), parallel.unreplicate(metrics)


def independent_loss(params, batch):
  """Loss with penalties and loss without, by the formulas of ListMLE and MSE."""
  model = MODEL.clone(opcodes=len(batch.graph.nodes["opcode"]))  # one for each node
  scores = model.apply({"params": params}, batch)
  listmle, square, items = [], 0.0, 0
  for row, (label, mask) in enumerate(zip(batch.target, batch.config_mask)):
    order = [i for i in np.argsort(-label) if mask[i]]
    if order:
      score = scores[row, jnp.array(order)]
      scaled = score / TEMPERATURE
      listmle.append(sum(jax.nn.logsumexp(scaled[k:]) - scaled[k] for k in range(len(order))))
      square += jnp.sum(jnp.square(score - label[order]))
      items += len(order)
  ranking = 0.75 * sum(listmle) / len(listmle) + 0.25 * square / items
  leaves = jax.tree_util.tree_leaves_with_path(params)
  kernels = [leaf for path, leaf in leaves if path[-1].key == "kernel"]
  nodes = int(batch.graph.n_node[:-1].sum())
  embedded = params["op_embedding"]["table"]["embedding"][batch.graph.nodes["opcode"][:nodes]]
  activity = jnp.sum(jnp.square(embedded)) / nodes
  penalty = KERNEL_L2 * sum(jnp.sum(jnp.square(k)) for k in kernels) + ACTIVITY_L2 * activity
  return ranking + penalty, ranking


def per_lookup(params, batch):
  """The same model and batch, where every node has an opcode of its own."""
  opcode = batch.graph.nodes["opcode"]
  nodes = dict(batch.graph.nodes, opcode=np.arange(len(opcode)))
  table = params["op_embedding"]["table"]["embedding"][opcode]
  return (
    dict(params, op_embedding={"table": {"embedding": table}}),
    batch._replace(graph=batch.graph._replace(nodes=nodes)),
  )


def test_chunks_of_configurations_take_the_same_step(train_step):
  chunked = make_step(config_chunk=CONFIGS // 2)
  expected = take_step(train_step, device_batches(1))
  comparing.assert_trees_close(take_step(chunked, device_batches(1)), expected)


def test_step_follows_the_formulas_of_loss_penalties_and_clipping(train_step):
  batch = device_batches(1)[0]
  start = init_params()
  params, metrics = take_step(train_step, [batch])
  gradient = jax.jit(
    lambda p: jax.value_and_grad(independent_loss, has_aux=True)(*per_lookup(p, batch))
  )
  (loss, ranking), grads = gradient(start)
  assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
  assert metrics["ranking_loss"] == pytest.approx(float(ranking), rel=1e-5)

  norms, grads = jax.tree.map(np.asarray, (jax.jit(variable_norms)(grads), grads))
  lookups = grads["op_embedding"]["table"]["embedding"]
  by_opcode = np.zeros_like(start["op_embedding"]["table"]["embedding"])
  np.add.at(by_opcode, batch.graph.nodes["opcode"], lookups)
  grads["op_embedding"]["table"]["embedding"] = by_opcode
  norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grads)))
  assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
  # Keras clips an embedding by the norm over lookups, not over rows of the table.
  clipped = jax.tree.map(lambda g, n: g * MAX_NORM / np.maximum(n, MAX_NORM), grads, norms)
  comparing.assert_trees_close(params, jax.tree.map(lambda p, g: p - g, start, clipped))


def test_any_number_of_devices_takes_the_same_step(train_step):
  """Two take it in `tests/run/test_end_to_end.py`."""
  assert jax.local_device_count() == 4
  state, one_metrics = take_step(train_step, device_batches(1), steps=2)
  many, many_metrics = take_step(train_step, device_batches(4), steps=2)
  comparing.assert_trees_close(many, state)
  comparing.assert_trees_close(many_metrics, one_metrics)


@pytest.mark.parametrize("count, per_step", [(5, 8), (9, 8)])
def test_a_batch_that_is_not_full_is_the_same_step_on_any_number_of_devices(
  train_step, count, per_step
):
  """Ties are in the order of random keys: another key of a slate is another loss."""
  rng = np.random.default_rng(0)
  graphs = [random_graphs.tile_graph(rng, nodes=4 + i, edges=9, configs=4) for i in range(count)]
  prepared = [batching.prepare(graph, graph.node_feat, slots=2) for graph in graphs]
  sampler = lambda number, rng, turn: (np.arange(4), np.float32([1, 1, 2, 2]))
  losses_of, params_of = {}, {}
  for devices in (1, 2, 4):
    plan = BatchPlan(
      prepared,
      slates_per_step=per_step,
      devices=devices,
      draw=draw_slates(prepared, sampler),
      seed=0,
      epochs=1,
      drop_remainder=False,
    )
    assemble = functools.partial(
      random_graphs.assemble, graphs=plan.slates_per_device, configs=CONFIGS
    )
    last = Batches(plan, plan.steps_per_epoch, range(devices), assemble, list)[
      plan.steps_per_epoch - 1
    ]
    params_of[devices], metrics = take_step(train_step, last)
    losses_of[devices] = float(metrics["loss"])
    comparing.assert_trees_close(params_of[devices], params_of[1])
  np.testing.assert_allclose([losses_of[2], losses_of[4]], losses_of[1], rtol=1e-6)


def test_contents_of_padding_have_no_influence(train_step):
  batch = device_batches(1)[0]
  rng = np.random.default_rng(2)

  def garbage(array, real):
    noise = 10 * rng.normal(size=array.shape)
    return np.where(real, array, noise).astype(array.dtype)

  nodes = int(batch.graph.n_node[:-1].sum())
  real_node = (np.arange(len(batch.graph.nodes["opcode"])) < nodes)[:, None]
  assert not real_node.all() and not batch.config_mask.all()
  nodes = batch.graph.nodes | {"feat": garbage(batch.graph.nodes["feat"], real_node)}
  spoiled = batch._replace(
    graph=batch.graph._replace(nodes=nodes),
    config_feat=garbage(batch.config_feat, batch.config_mask[..., None]),
    target=garbage(batch.target, batch.config_mask),
  )
  comparing.assert_trees_close(
    take_step(train_step, [spoiled]), take_step(train_step, [batch]), tolerance=1e-6
  )


class Noisy(nn.Module):
  """Scores `[G, C]` that are random numbers times one parameter."""

  @nn.compact
  def __call__(self, batch, *, train=False):
    scale = self.param("scale", nn.initializers.zeros, (), jnp.float32)
    return scale * jax.random.normal(self.make_rng("dropout"), batch.target.shape)


def noisy_step(seed):
  return make_train_step(Noisy(), optax.sgd(0.5), losses.LossOptions(losses="MSE:1"), seed=seed)


def noisy_state(step):
  state = TrainState.create({"scale": jnp.zeros(())}, optax.sgd(0.5))
  return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state.replace(step=step))


@pytest.mark.parametrize("seed, number", [(0, 0), (7, 3), (2**40 + 7, 3)])
def test_the_random_stream_of_a_step_is_that_of_its_seed_and_number(seed, number):
  batch = device_batches(1)[0]
  key = jax.random.fold_in(jax.random.key(seed), number)
  noise = Noisy().apply({"params": {"scale": 1.0}}, batch, rngs={"dropout": key})
  where = np.where(batch.config_mask)
  slope = -2 * np.mean(np.asarray(noise)[where] * batch.target[where])
  stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch)
  state, _ = noisy_step(seed)(noisy_state(jnp.int32(number)), stacked)
  assert float(state.params["scale"][0]) == pytest.approx(-0.5 * slope, rel=1e-4)


def test_two_seeds_are_one_program_for_a_compilation_cache():
  stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], device_batches(1)[0])
  texts = [
    step.func.lower(*step.args, noisy_state(jnp.int32(0)), stacked).as_text()
    for step in (noisy_step(0), noisy_step(1))
  ]
  assert texts[0] == texts[1]
