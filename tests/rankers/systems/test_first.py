"""The 1st place against numbers of its public code, and its blocks against NumPy."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import parts, random_graphs, winners
from tests.support.random_graphs import made_of
from tpugraphs_jax import columns, hlo
from tpugraphs_jax.data import batching, transforms
from tpugraphs_jax.data.transforms import Transform
from tpugraphs_jax.hlo import proto
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.nodes import Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems import first

BLOCKS = ("linear", "linear2", "convs_0", "convs_1")
LAYOUTS = ("first/default", "first/random")
TILES = ("first/tile",)


class Case(winners.Case):
  """A record beside a run of the preset on its graph."""

  def __init__(self, name, root):
    self.record = winners.Record(name)
    self.settings = self.record.settings
    self.is_tile = "kernel" in self.settings
    across = self.settings["use_cross_attn"]
    collection = "layout.py:xla-" + ("default" if across else "random")
    self.variant = "tile.py:preset=first" if self.is_tile else f"{collection},preset=first"
    weights = self.record.under("weights")
    train = {"graph": self.record.under("input")}
    self.experiment = winners.run_of(
      self.variant,
      {"train": train},
      root,
      **{
        "model.width": weights["linear2.linear.weight"].shape[1],
        "model.op_embed_dim": weights["embedding_op.weight"].shape[1],
        "model.value_embed_dim": weights["embedding_layout_cfg.weight"].shape[1],
      },
    )
    (self.graph,) = self.experiment.data.load("train")
    self.fitted = self.experiment.ranker.features.transforms
    # The published scales are of graphs that the record does not hold.
    scaler = lambda name: Transform(
      np.arange(len(self.record[f"input/{name}_mean"])),
      np.zeros(len(self.record[f"input/{name}_mean"]), bool),
      *(self.record[f"input/{name}_{part}"].astype(np.float32) for part in ("mean", "scale")),
    )
    ranker = self.experiment.ranker
    ranker.features.transforms = self.fitted | {ranker.features.names[0]: scaler("scaler")}
    if self.is_tile:
      ranker.family.config_transform = scaler("cfg_scaler")
    (self.prepared,) = self.experiment.prepare([self.graph])

  @functools.cached_property
  def batch(self):
    count = len(self.record["scores"])
    assert len(self.graph.configs) == count
    return winners.batch_of(self.experiment, [self.prepared], [np.arange(count)])

  @functools.cached_property
  def params(self):
    weights = self.record.under("weights")
    rows = weights["embedding_op.weight"]
    ours = {
      path_of(name): value if name.startswith("embedding") else value.T
      for name, value in weights.items()
    }
    ours["linear/linear/kernel"] = ours["linear/linear/kernel"][self.columns]
    ours["opcodes/embedding/table"] = np.pad(rows, ((0, 121 - len(rows)), (0, 0)))
    return winners.tree(ours)

  @property
  def columns(self):
    """The rows of our first kernel among the published ones."""
    weights = self.record.under("weights")
    inputs = weights["linear.linear.weight"].shape[1]
    opcode, value = (weights[f"embedding_{name}.weight"].shape[1] for name in ("op", "layout_cfg"))
    configuration = 0 if self.is_tile else 18 * value
    numbers = inputs - opcode - 6 * value - configuration
    # Published: numbers, configuration, own layout, opcode.
    own = np.arange(numbers + configuration, inputs)
    return np.concatenate([np.arange(numbers), own, numbers + np.arange(configuration)])

  def public(self, name: str, ours: np.ndarray) -> np.ndarray:
    """An array in our order in that of the public weight."""
    if name != "linear.linear.weight":
      return ours.T if not name.startswith("embedding") else ours
    result = np.zeros_like(ours)
    result[self.columns] = ours
    return result.T


def path_of(name: str) -> str:
  """Our path of a public weight."""
  if name.startswith("embedding"):
    return "layouts/table" if "layout" in name else "opcodes/embedding/table"
  *layer, last = name.split(".")
  if last == "temperature":
    return (
      f"{layer[0]}/gates/cross_attn/temperature"
      if len(layer) == 2
      else (f"convs_{layer[1]}/gates/cross_attn/temperature")
    )
  kind = "kernel" if last == "weight" else "bias"
  if layer[0] == "convs":
    part = {
      "lin_l": {"kernel": "conv/users", "bias": "conv/self"}[kind],
      "lin_r": "conv/self",
      "linear1": "gates/attn/linear1",
      "linear2": "gates/attn/linear2",
    }[layer[-1]]
    return f"convs_{layer[1]}/{part}/{kind}"
  if layer[0] in ("linear", "linear2"):
    part = "linear" if layer[1] == "linear" else f"gates/attn/{layer[2]}"
    return f"{layer[0]}/{part}/{kind}"
  place = {
    "classifier": "last",
    "dense_cfg.0": "dense_cfg_0",
    "dense_cfg.3": "dense_cfg_1",
    "dense.0": "dense_0",
    "dense.3": "dense_1",
    "dense.6": "last",
  }[".".join(layer)]
  return f"{place}/{kind}"


case = winners.fixture(Case)
of_layouts = pytest.mark.parametrize("case", LAYOUTS, indirect=True)
of_every_record = pytest.mark.parametrize("case", [*LAYOUTS, *TILES], indirect=True)


@of_layouts
def test_the_program_is_cut_as_published(case):
  record, edges = case.record, np.asarray(case.prepared.edge_index)
  theirs = record["expected/edge_index"].T
  order = lambda pairs: pairs[np.lexsort(pairs.T)]
  np.testing.assert_array_equal(order(edges), order(theirs))
  np.testing.assert_array_equal(case.prepared.opcode, record["expected/node_opcode"])
  np.testing.assert_array_equal(
    case.prepared.configs.decode(np.arange(len(case.prepared.configs))),
    record["expected/node_config_feat"],
  )
  configurable = case.prepared.by_hop.node[: len(case.graph.config_node)]
  np.testing.assert_array_equal(configurable, record["expected/node_config_ids"])


@of_layouts
def test_scales_are_of_the_nodes_at_edges_of_configurable_nodes(case):
  edges = case.record["input/edge_index"]
  kept = np.unique(edges[np.isin(edges, case.record["input/node_config_ids"]).any(axis=1)])
  feat = case.record["input/node_feat_minus_one"][kept, :134].astype(np.float64)
  varies = np.ptp(feat, axis=0) > 0
  fitted = case.fitted["first"]
  winners.assert_near(fitted.offset, feat.mean(axis=0), 1e-6, "means")
  winners.assert_near(fitted.scale, np.where(varies, feat.std(axis=0), 1), 1e-6, "deviations")


@of_every_record
def test_statistics_are_the_published_ones(case, tmp_path):
  """Of AlexNet and UNet3D with two layouts each, on which scales do not depend, or of 9 kernels."""
  released = winners.arrays("first", f"fitted_on/{'tile' if case.is_tile else 'layout'}")
  graphs = {name: winners.under(released, name) for name in {key.split("/")[0] for key in released}}
  ranker = winners.run_of(
    case.variant, {"train": graphs}, tmp_path, **{"batch.min_configs": 2}
  ).ranker
  scalers = {"scaler": ranker.features.transforms[ranker.features.names[0]]}
  if case.is_tile:
    scalers["cfg_scaler"] = ranker.family.config_transform
  for name, fitted in scalers.items():
    winners.assert_near(fitted.offset, case.record[f"input/{name}_mean"], 1e-6, name)
    winners.assert_near(fitted.scale, case.record[f"input/{name}_scale"], 1e-6, name)


@of_every_record
def test_features_from_the_raw_file_are_the_published_ones(case):
  feat = case.prepared.feat
  winners.assert_near(feat[:, :134], case.record["expected/node_feat"], 1e-6, "numbers")
  np.testing.assert_array_equal(feat[:, 134:], case.record["expected/node_layout_feat"])
  if case.is_tile:
    winners.assert_near(
      case.batch.config_feat[0], case.record["expected/config_feat"], 1e-6, "tiles"
    )


@of_every_record
def test_blocks_and_scores_are_the_published_ones(case):
  scores, _, _, layers = case.results
  winners.assert_near(scores[0], case.record["scores"], 1e-5, "scores")
  for name in BLOCKS:
    expected = case.record[f"act/{name.replace('_', '.')}"]
    found = np.swapaxes(parts.everywhere(layers[name]), 0, 1)
    shown = np.arange(expected.shape[0]) if case.is_tile else case.record["act_nodes"]
    found = found[0, shown] if case.is_tile else found[: len(expected), shown]
    winners.assert_near(found, expected, 1e-5, name)
  if case.is_tile:
    winners.assert_near(layers["dense_cfg_1"][0], case.record["act/dense_cfg"], 1e-5, "tiles")


@of_every_record
def test_the_loss_and_its_gradients_are_the_published_ones(case):
  _, _, grads, _ = case.results
  loss = winners.loss_of(case.experiment, case.batch)(case.record["scores"][None])
  winners.assert_near(loss, case.record["loss"], 1e-6, "loss")
  norms, rows = case.record.under("grad_norm"), case.record.under("grad_first_rows")
  largest = max(norms.values())
  for name, norm in norms.items():
    if norm < 1e-6 * largest:  # a bias in front of a norm, or the last one: 0 but for rounding
      assert np.linalg.norm(grads.get(path_of(name), 0)) < 1e-5 * largest, name
      continue
    ours = case.public(name, grads[path_of(name)])
    winners.assert_near(np.linalg.norm(ours), norm, 1e-4, name)
    if name in rows:
      expected = np.atleast_1d(rows[name])
      winners.assert_near(np.atleast_1d(ours)[: len(expected)], expected, 1e-4, name)


@of_layouts
def test_rates_updates_and_losses_of_a_run_are_the_published_ones(case):
  """Twenty updates of one slate without dropout."""
  lrs, losses, norms = (
    case.record[f"train_without_dropout/{name}"] for name in ("lrs", "losses", "norms")
  )
  options = case.experiment.config.optimizer
  rates = options.rate_after(len(lrs))
  np.testing.assert_allclose([rates(step) for step in range(len(lrs))], lrs, atol=1e-9)
  optimizer = options.create(len(lrs))

  @jax.jit
  def step(params, grads, opt_state):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)

  params, opt_state, found = case.params, optimizer.init(case.params), []
  for number in range(len(lrs)):
    before = params
    (loss, _), grads = case.run(params)
    params, opt_state, norm = step(params, grads, opt_state)
    found.append((loss, norm))
    if number == 1:  # the first update has a rate of 0, and both have the same gradient
      check_update(before, params, grads, float(norm), lrs[1])
  found = np.array(found)
  winners.assert_near(found[:, 0], losses, 1e-4, "losses")
  winners.assert_near(found[:, 1], norms, 1e-2, "norms")
  (_, (scores, _)), _ = case.run(params)
  winners.assert_near(scores[0], case.record["train_without_dropout/scores"], 1e-3, "scores")


def check_update(before, after, grads, norm, rate):
  """AdamW as in PyTorch behind two equal gradients: the bias correction gives the gradient."""
  clip = min(1, 1 / (norm + 1e-6))
  for path, new in winners.flat(after).items():
    old, grad = (winners.flat(tree)[path].astype(np.float64) for tree in (before, grads))
    expected = -rate * (clip * grad / (clip * np.abs(grad) + 1e-8) + 1e-5 * old)
    np.testing.assert_allclose(new - old, expected, rtol=1e-3, atol=3e-7, err_msg=path)


@of_every_record
def test_initial_parameters_are_those_of_pytorch(case):
  special = [f"{block}/linear/{kind}" for block in BLOCKS[:2] for kind in ("kernel", "bias")]
  params = winners.assert_torch_parameters(
    case.experiment.ranker.family.network, case.batch, skip=special, temperature=0.5
  )
  for block in BLOCKS[:2]:
    kernel = params[f"{block}/linear/kernel"]
    deviation = np.sqrt(2 / sum(kernel.shape))  # Xavier's normal
    assert abs(kernel.std() / deviation - 1) < 3 / np.sqrt(kernel.size)
    np.testing.assert_array_equal(params[f"{block}/linear/bias"], np.float32(0.01))


# Features.


def test_lists_of_dimensions_are_marked_behind_their_ends():
  """A graph by hand: a dimension number of 0 stays where it is in the list."""
  dimensions = columns.NODE["dimensions"].start
  values = {  # of a window of two dimensions, one of them reversed; and of lists
    "convolution": {91: 1, 92: 1, 95: 1, 96: 2},
    "broadcast": {dimensions: 1, dimensions + 1: 2},
    "transpose": {dimensions: 1},
  }
  shapes = {
    "parameter": (4, 8),
    "convolution": (4, 8),
    "broadcast": (2, 4, 8),
    "transpose": (8, 4),
    "reduce": (8,),
    "concatenate": (4, 8),
    "add": (4, 8),
  }
  nodes = []
  for name, shape in shapes.items():
    layout = {134 + place: len(shape) - 1 - place for place in range(len(shape))}
    nodes.append((name, "f32", shape, values.get(name, {}) | layout))
  nodes.append(("reduce", "tuple", (), {columns.NODE["tuple_size"].start: 2, dimensions: 1}))
  graph = made_of(nodes, [[1, 0], [2, 1], [3, 1], [4, 3], [5, 1], [6, 1], [7, 1]])
  feat = graph.node_feat
  found = first.pad_lists(graph)
  lists = {
    name: found[:, columns.NODE[name]].tolist()
    for name in ("dimensions", "input_spatial_dimensions", "kernel_spatial_dimensions")
  }
  given = [], [], [1, 2], [1, 0], [0], [0], [], [1]
  assert lists["dimensions"] == [dims + [-1] * (6 - len(dims)) for dims in given]
  nothing = [-1] * 4
  assert lists["input_spatial_dimensions"] == [nothing, [1, 2, -1, -1], *[nothing] * 6]
  assert lists["kernel_spatial_dimensions"] == [nothing, [0, 0, -1, -1], *[nothing] * 6]
  others = np.setdiff1d(np.arange(140), np.r_[31:37, 95:99, 101:105, 134:140])
  np.testing.assert_array_equal(found[:, others], feat[:, others])
  for node, (rank, layout) in enumerate(zip(first.ranks(feat), found[:, 134:].tolist())):
    assert layout == [*range(rank)][::-1] + [-1] * (6 - rank), node


@pytest.mark.parametrize("name", ["shapes", "control_flow", "mlp_train_opt", "convs"])
def test_ranks_are_those_of_protobufs_also_of_arrays_without_elements(name):
  graph = hlo.featurize(Path(__file__).parents[2] / f"data/hlo/{name}.hlo.pb")
  rank = [len(node.shape.dimensions) for node in proto.instructions(graph.module)]
  np.testing.assert_array_equal(first.ranks(graph.node_feat), np.minimum(rank, 6))


def test_constant_columns_stay_and_have_the_scale_1():
  x = np.random.default_rng(0).normal(5, 3, (40, 3))
  x[:, 1] = 7
  fitted = transforms.fit([x[:25], x[25:]], np.full(3, "first", object))
  expected = (x - x.mean(axis=0)) / np.where([True, False, True], x.std(axis=0), 1)
  np.testing.assert_allclose(fitted(x), expected, rtol=1e-5, atol=1e-6)


# Layers.

CONFIGS = 3


def batch_of(kind, spare=0, configs=CONFIGS):
  """Two graphs, one with fewer configurations than places, and `spare` places of everything."""
  rng, prepared = np.random.default_rng(0), []
  is_layout = kind == "layout"
  make = getattr(random_graphs, f"{kind}_graph")
  prepare = functools.partial(batching.prepare_program, hops=0) if is_layout else batching.prepare
  for nodes, count in ((9, 5), (5, 2)):
    more = {"config_nodes": [2, 0]} if is_layout else {}
    graph = make(rng, nodes=nodes, edges=2 * nodes, configs=count, **more)
    numbers = rng.normal(size=(nodes, 4))
    feat = np.concatenate([numbers, rng.integers(-1 if is_layout else 0, 6, (nodes, 6))], axis=1)
    prepared.append(prepare(graph, feat.astype(np.float32), slots=1))
  return random_graphs.batch_of(
    prepared, CONFIGS, spare=spare, graphs=2 + (spare > 0), places=configs
  )


KINDS = pytest.mark.parametrize("kind", ["layout", "tile"])


def network_of(kind, **options):
  return base.create_network(kind, "First", width=16, op_embed_dim=4, **options)


@KINDS
def test_padding_changes_neither_scores_nor_gradients(kind):
  network, plain = network_of(kind), batch_of(kind)
  padded = batch_of(kind, spare=3, configs=CONFIGS + 2)
  params = parts.params_of(network, plain)
  weight = np.random.default_rng(1).normal(size=(2, CONFIGS)).astype(np.float32)

  @jax.jit
  def run(params, batch):
    def loss(params):
      scores = network.apply({"params": params}, batch)[:2, :CONFIGS]
      scores = jnp.where(plain.config_mask, scores, 0)
      return (scores * weight).sum(), scores

    return jax.grad(loss, has_aux=True)(params)

  (grads, scores), (padded_grads, padded_scores) = run(params, plain), run(params, padded)
  np.testing.assert_allclose(padded_scores, scores, rtol=1e-5, atol=1e-6)
  largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
  for leaf, padded_leaf in zip(*map(jax.tree.leaves, (grads, padded_grads))):
    np.testing.assert_allclose(padded_leaf, leaf, atol=1e-5 * largest)


@KINDS
def test_dropout_is_behind_sage_blocks_and_in_the_layers_of_tiles(kind):
  """It leaves out the same features in all configurations."""
  network, batch = network_of(kind, dropout=0.5), batch_of(kind)
  params = parts.params_of(network, batch)

  seeing = dict(capture_intermediates=True, mutable=["intermediates"], method="embed")

  @functools.partial(jax.jit, static_argnums=1)
  @functools.partial(jax.vmap, in_axes=(None, None), axis_name=parallel.DEVICES, axis_size=1)
  def outputs(params, train):
    rngs = {"dropout": jax.random.key(1)}
    readout, seen = network.apply({"params": params}, batch, train=train, rngs=rngs, **seeing)
    return readout, seen["intermediates"]

  (readout, dropped), (_, whole) = (
    jax.tree.map(lambda leaf: leaf[0], outputs(params, train)) for train in (True, False)
  )
  real = np.asarray(Slates.of(batch).graph_of) == 0  # has all configurations
  value = lambda seen, name: np.asarray(parts.everywhere(seen[name]["__call__"][0]))[real]
  for name in ("linear", "linear2"):
    np.testing.assert_array_equal(value(dropped, name), value(whole, name))
  zero = value(dropped, "convs_0") == 0
  assert (zero == zero[:, :1]).all() and 0.4 < zero.mean() < 0.6
  np.testing.assert_allclose(
    value(dropped, "convs_0"), np.where(zero, 0, 2 * value(whole, "convs_0")), rtol=1e-5
  )
  if kind == "tile":
    zero = np.asarray(readout[0]) == 0
    assert 0.2 < zero.mean() < 0.8 and (zero == zero[:1]).all()


def test_attention_across_configurations_is_a_softmax_over_real_ones():
  batch = batch_of("layout", spare=2, configs=CONFIGS + 1)
  shape = len(batch.block_mask), CONFIGS + 1, 4
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  params = {"params": {"temperature": np.float32(0.7)}}
  attend = lambda x: first.CrossAttention().apply(params, Slates.of(batch).full(x)).everywhere()
  found = np.asarray(jax.jit(attend)(x))
  np.testing.assert_array_equal(found[..., :4], x)
  for node, graph in enumerate(np.asarray(Slates.of(batch).graph_of)):
    real = batch.config_mask[graph] if graph < 3 else np.zeros(CONFIGS + 1, bool)
    power = np.exp(x[node, real] / 0.7)
    np.testing.assert_allclose(
      found[node, real, 4:], x[node, real] * power / power.sum(axis=0), rtol=1e-5
    )
    assert (found[node, ~real, 4:] == 0).all()
