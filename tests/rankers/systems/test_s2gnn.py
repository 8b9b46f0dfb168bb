"""S2GNN against its public code and dense matrices, and the eigenvectors of awkward graphs."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from flax import traverse_util
import jax
import numpy as np
import pytest

from tests.support import parts, random_graphs, system_cases, winners
from tests.support.system_cases import (
  dense,
  sigmoid,
  slow_attention,
  slow_configs,
  slow_layer_norm,
  softmax,
)
from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.data.factoring import factor_layout_configs
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import files
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems import s2gnn

RECORD = Path(__file__).parents[2] / "data/s2gnn/record.npz"  # see record.py beside it
K = s2gnn.FREQUENCIES
SMALL = dict(op_embed_dim=6, width=4, heads=2, cutoff=0.7, dropout=0.0)


# Graphs.


def graph_of(edges, nodes: int) -> OpGraph:
  """A program with these edges (consumer, producer)."""
  rng = np.random.default_rng(0)
  graph = random_graphs.layout_graph(rng, nodes=nodes, edges=0, config_nodes=[0], configs=3)
  return dataclasses.replace(graph, edge_index=np.array(edges, np.int64).reshape(-1, 2))


def star(leaves: int) -> OpGraph:
  """A node with many operands: the eigenvalue 1 has all but two eigenvectors."""
  return graph_of([(0, leaf) for leaf in range(1, leaves + 1)], leaves + 1)


def comb(teeth: int, length: int) -> OpGraph:
  """A chain with two equal paths at each of its nodes: many eigenvalues occur several times."""
  edges, node = [(i + 1, i) for i in range(teeth - 1)], teeth
  for tooth in range(teeth):
    for _ in range(2):
      for above in (tooth, *range(node, node + length - 1)):
        edges.append((above, node))
        node += 1
  return graph_of(edges, node)


def with_spectrum(graph: OpGraph) -> OpGraph:
  """The graph with two features and the columns of the spectrum as its inputs."""
  feat = np.concatenate([graph.node_feat[:, :2], s2gnn.spectrum_columns(graph)], axis=1)
  return dataclasses.replace(graph, node_feat=feat.astype(np.float32))


def batch_of(graphs, **options):
  return system_cases.layout_batch(hops=1, graphs=[with_spectrum(g) for g in graphs], **options)


GRAPHS = system_cases.raw_layouts()


# Slow formulas.


def slow_laplacian(edges, nodes: int) -> np.ndarray:
  """The magnetic Laplacian, entry by entry."""
  count = np.zeros((nodes, nodes))
  for consumer, producer in edges:
    count[consumer, producer] += consumer != producer
  linked = (count + count.T > 0).astype(float)
  result = np.eye(nodes, dtype=complex)
  for u, v in np.argwhere(linked):
    turn = np.exp(2j * np.pi * s2gnn.POTENTIAL * (count[u, v] - count[v, u]))
    result[u, v] -= turn / np.sqrt(linked[u].sum() * linked[v].sum())
  return result


def component(laplacian: np.ndarray) -> np.ndarray:
  """Nodes of the largest component, of equal ones that of the first node."""
  reach = np.linalg.matrix_power((laplacian != 0).astype(float) + np.eye(len(laplacian)), 64) > 0
  return np.flatnonzero(reach[reach.sum(axis=1).argmax()])


def slow_spectrum(edges, nodes: int) -> tuple[np.ndarray, np.ndarray, float]:
  laplacian = slow_laplacian(edges, nodes)
  eigen = component(laplacian)
  values, vectors = np.linalg.eigh(laplacian[np.ix_(eigen, eigen)])
  whole = np.zeros((nodes, len(eigen)), complex)
  whole[eigen] = vectors
  if len(eigen) <= K:
    return values, whole, values[-1] + 1
  kept = values[:K] < values[K] - 1e-5 * values[K]
  return values[:K][kept], whole[:, :K][:, kept], values[K]


def slow_positions(edges, nodes, values, vectors):
  laplacian = slow_laplacian(edges, nodes)
  linked = (laplacian != 0) & ~np.eye(nodes, dtype=bool)
  result = np.zeros((nodes, K), complex)
  for j in range(len(values)):
    weight = np.stack([softmax(-((values - value) ** 2) / 1e-7)[j] for value in values])
    result[:, j] = ((vectors * weight @ vectors.conj().T) * linked).sum(axis=1)
  return result


def slow_window(values, bound, cutoff):
  share = values / min(bound, cutoff)
  inside = np.where(share <= 0.5, 1, np.cos(np.pi * (share - 0.5)))
  return np.where(share >= 1, 0, inside)


def prelu(x, params):
  return np.where(x > 0, x, params["negative_slope"] * x)


class SlowNetwork:
  """Scores of one graph and configuration, by dense matrices."""

  def __init__(self, params, edges, opcode, feat):
    self.params, self.edges, self.opcode, self.nodes = params, edges, opcode, len(opcode)
    self.values, self.vectors, self.bound = slow_spectrum(edges, self.nodes)
    place = slow_positions(edges, self.nodes, self.values, self.vectors)
    gain = params["op_weights"] * self.table(params["opcodes"])
    place = np.concatenate([place.real, place.imag], axis=1)
    self.static = dense(feat, params["features"]) + gain + dense(place, params["positions"])

  def table(self, params) -> np.ndarray:
    rows = params["embedding"]["table"][self.opcode]
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)

  def frequencies(self) -> np.ndarray:
    params, values = self.params["frequencies"], self.values
    mean, share = values.sum() / K, len(values) / self.nodes
    inputs = params["scale"] * np.stack([values, 0 * values + mean, 0 * values + share], axis=1)
    x = np.maximum(dense(inputs, params["linear"]), 0)
    heard = slow_attention(x, x, params["attention"], SMALL["heads"])
    return x + slow_layer_norm(heard, params["norm"], 1e-5)

  def gains(self, x, params) -> np.ndarray:
    times = self.table(params["real"]) * x + 1j * self.table(params["imag"]) * x
    return dense(self.frequencies(), params["gain"]) * (self.vectors.conj().T @ times)

  def filter(self, x, params) -> tuple[np.ndarray, np.ndarray]:
    y = self.gains(x, params["gains"])
    for number in range(2):
      y = y @ params[f"mix_{number}"]["kernel"]
      y = y * sigmoid(np.linalg.norm(y, axis=0))
    y = slow_window(self.values, self.bound, SMALL["cutoff"])[:, None] * y
    result = self.vectors @ y
    return params["factor"][0] * result.real + params["factor"][1] * result.imag, abs(y) ** 2

  def messages(self, x, params) -> np.ndarray:
    operands, users = np.ones(self.nodes), np.ones(self.nodes)
    for consumer, producer in self.edges:
      operands[consumer] += 1
      users[producer] += 1
    loops = [(node, node) for node in range(self.nodes)]
    ahead, back = np.zeros((2, self.nodes, len(params["bias"]) // 2))
    for consumer, producer in [*self.edges, *loops]:
      weight = 1 / np.sqrt(operands[consumer] * users[producer])
      ahead[consumer] += weight * (x[producer] @ params["operands"]["kernel"])
      back[producer] += weight * (x[consumer] @ params["users"]["kernel"])
    return np.concatenate([ahead, back], axis=1) + params["bias"]

  def score(self, config, configured) -> float:
    params = self.params
    layouts = dense(config * params["config_weights"], params["layouts"])
    x = self.static + np.where(configured[:, None], layouts, 0)
    for name in ("first", "second"):
      x = prelu(dense(x, params[name]), params[f"{name}_prelu"])
    squares = []
    for number in range(3):
      name = f"messages_{number}"
      x = prelu(self.messages(x, params[name]), params[f"{name}_prelu"])
      if number < 2:
        x, square = self.filter(x, params[f"filter_{number}"])
        squares.append(square.sum(axis=0))
    last = slow_window(self.values, self.bound, np.inf)[:, None] * self.gains(x, params["readout"])
    squares.append((abs(last) ** 2).sum(axis=0))
    amplitudes = np.sqrt(np.concatenate(squares) + 1e-9) - np.sqrt(1e-9)
    sums = np.concatenate([x.sum(axis=0), x[configured].sum(axis=0)])
    readout = np.concatenate(
      [
        slow_layer_norm(sums, params["norm"], 1e-5),
        slow_layer_norm(amplitudes, params["amplitude_norm"], 1e-5),
      ]
    )
    return dense(prelu(dense(readout, params["hidden"]), params["prelu"]), params["last"])[0]


# The network.


def network_and_params(batch, **options):
  network = base.create_network("layout", "S2GNN", **SMALL | options)
  return network, parts.params_of(network, batch, scale=0.6)


@functools.partial(jax.jit, static_argnums=0)
def _apply(network, params, batch):
  return network.apply({"params": params}, batch)


def scores_of(network, params, batch):
  return np.asarray(_apply(network, params, batch))


def test_scores_equal_those_of_dense_matrices():
  graphs = [*GRAPHS, comb(3, 2)]
  batch = batch_of(graphs)
  network, params = network_and_params(batch)
  found = scores_of(network, params, batch)
  config, configured = slow_configs(batch)
  start = 0
  for number, graph in enumerate(graphs):
    nodes = slice(start, start + graph.num_nodes)
    slow = SlowNetwork(params, graph.edge_index.tolist(), graph.node_opcode, graph.node_feat[:, :2])
    for c in np.flatnonzero(batch.config_mask[number]):
      expected = slow.score(np.nan_to_num(config[nodes, c]), configured[nodes])
      np.testing.assert_allclose(found[number, c], expected, rtol=1e-5, atol=1e-5)
    start += graph.num_nodes
  assert np.ptp(found[0]) > 1e-2


def test_eigenvectors_of_a_repeated_eigenvalue_may_be_any():
  graph = with_spectrum(comb(3, 3))
  values, vectors, _ = s2gnn.spectrum(comb(3, 3))
  again = np.flatnonzero(np.diff(values) < 1e-9)
  assert len(again) >= 6
  rng = np.random.default_rng(0)
  turned = vectors * np.exp(2j * np.pi * rng.random(len(values)))
  for group in np.split(np.arange(len(values)), np.flatnonzero(np.diff(values) > 1e-6) + 1):
    size = len(group), len(group)
    unitary = np.linalg.qr(rng.normal(size=size) + 1j * rng.normal(size=size))[0]
    turned[:, group] = turned[:, group] @ unitary
  assert abs(turned - vectors).max() > 0.1
  feat = graph.node_feat.copy()
  feat[:, 2 + 2 * K : 2 + 4 * K].reshape(-1, 2, K)[:, :, : len(values)] = np.stack(
    [turned.real, turned.imag], axis=1
  )
  other = dataclasses.replace(graph, node_feat=feat)
  batches = [system_cases.layout_batch(hops=1, graphs=[program]) for program in (graph, other)]
  network, params = network_and_params(batches[0])
  expected, found = (scores_of(network, params, batch)[0] for batch in batches)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  assert np.ptp(expected) > 1e-2


def test_positions_are_the_same_for_any_eigenvectors():
  graph = comb(3, 3)
  values, vectors, _ = slow_spectrum(graph.edge_index, graph.num_nodes)
  expected = slow_positions(graph.edge_index, graph.num_nodes, values, vectors)[:, : len(values)]
  found = s2gnn.positions(graph, s2gnn.spectrum(graph))
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert abs(expected).max() > 0.1


def test_padding_and_shared_nodes_change_nothing():
  batch = batch_of(GRAPHS)
  network, _ = network_and_params(batch, rounds=2)
  system_cases.assert_alike(network, batch, batch_of(GRAPHS, spare=7, reuse=False), roundings=4)


def test_a_residual_adds_what_a_filter_reads():
  """A filter whose factors are 0 then changes nothing."""
  batch = batch_of(GRAPHS)
  network, params = network_and_params(batch, rounds=2, residual=True)
  silent = params | {"filter_0": params["filter_0"] | {"factor": np.zeros((2, 4), np.float32)}}
  without, _ = network_and_params(batch, rounds=2)
  found, flat = scores_of(network, silent, batch), scores_of(without, silent, batch)
  assert np.ptp(found[0]) > 1e-2 and np.isfinite(flat).all()
  assert abs(found - flat).max() > 1e-2


def shapes_of(network, batch):
  shapes = jax.eval_shape(network.init, jax.random.key(0), batch)["params"]
  return traverse_util.flatten_dict(shapes, sep="/")


def test_it_begins_as_in_pytorch():
  batch = batch_of(GRAPHS[:1])
  network = base.create_network("layout", "S2GNN", **SMALL)
  paths = shapes_of(network, batch)
  skip = [path for path in paths if "attention" in path or path == "frequencies/scale"]
  begin = winners.assert_torch_parameters(
    network,
    batch,
    skip=[*skip, *(f"messages_{number}/bias" for number in range(3))],
    op_weights=5,
    config_weights=5,
    negative_slope=0.25,
    factor=1,
  )
  assert begin["frequencies/scale"] == 10 and not begin["messages_0/bias"].any()


def test_the_preset_names_the_layers_that_decay_and_the_short_tables():
  experiment = parts.make("layout", "xla-random,preset=s2gnn")
  network = experiment.ranker.family.network
  paths = shapes_of(network, batch_of(GRAPHS[:1]))
  layers = {path.partition("/")[0] for path in paths}
  assert set(experiment.config.optimizer.decay_layers) == layers - {"last"}
  tables = {tuple(path.split("/")) for path in paths if path.endswith("embedding/table")}
  assert set(network.max_norms) == tables and len(tables) == 7
  assert paths["hidden/kernel"].shape == (5 * 96, 96)  # published: 480 channels to 96


def test_it_trains_on_all_layout_collections():
  config = parts.config_of("layout", "nlp-random,preset=s2gnn_all")
  assert sorted(config.data.also) == [
    "layout:nlp:default",
    "layout:xla:default",
    "layout:xla:random",
  ]
  assert parts.config_of("layout", "own-mine,preset=s2gnn_all").data.also == ()
  assert parts.config_of("layout", "xla-random,preset=s2gnn").data.also == ()


# Numbers of the public code.


def recorded() -> dict[str, np.ndarray]:
  with np.load(RECORD) as file:
    return dict(file)


def recorded_graph(record) -> OpGraph:
  """With the numbers of its configurations from 1 on as run times in microseconds."""
  configs = record["config"].transpose(1, 0, 2).astype(np.int8)
  runtime_ns = 1000 * np.arange(1, len(configs) + 1)
  graph = graph_of(record["edge_index"], len(record["opcode"]))
  return dataclasses.replace(
    graph,
    node_feat=record["features"],
    node_opcode=record["opcode"],
    config_node=record["config_node"].astype(np.int32),
    configs=factor_layout_configs(configs, runtime_ns),
  )


def recorded_params(record):
  """The public weights under our names."""
  w = {name.removeprefix("weights/"): array for name, array in record.items()}
  attention = "gnn_layers.1.filter.filter."
  linear = {
    "features": "encoder.op_feats_lin",
    "positions": "encoder.posenc_lin",
    "layouts": "encoder.config_feats_lin",
    "first": "pre_mp.Layer_0.layer.model",
    "second": "pre_mp.Layer_1.layer.model",
    "frequencies/linear": f"{attention}cond_pre_linear",
    "frequencies/attention/out": f"{attention}cond_attention.out_proj",
    "filter_0/gains/gain": f"{attention}cond_post_linear",
    "filter_1/gains/gain": "gnn_layers.3.filter.filter",
    "readout/gain": "post_mp.filter.filter",
    "hidden": "post_mp.layer_post_mp.Layer_0.layer.model",
    "last": "post_mp.layer_post_mp.Layer_1.layer.model",
  }
  tables = {"opcodes": "encoder.emb"}
  slopes = {
    "first_prelu": "pre_mp.Layer_0.post_layer.1",
    "second_prelu": "pre_mp.Layer_1.post_layer.1",
    "prelu": "post_mp.layer_post_mp.Layer_0.post_layer.0",
  }
  norms = {
    "frequencies/norm": f"{attention}layer_norm",
    "norm": "post_mp.norm",
    "amplitude_norm": "post_mp.spec_norm",
  }
  params = {
    "op_weights": w["encoder.op_weights"].reshape(()),
    "config_weights": w["encoder.config_weights"].reshape(-1),
    "frequencies/scale": w[f"{attention}input_scale"].reshape(()),
  }
  for number in range(3):
    theirs, ours = f"gnn_layers.{2 * number}", f"messages_{number}"
    linear[f"{ours}/operands"] = f"{theirs}.conv.lin_forward"
    linear[f"{ours}/users"] = f"{theirs}.conv.lin_backward"
    slopes[f"{ours}_prelu"] = f"{theirs}.activation"
    params[f"{ours}/bias"] = w[f"{theirs}.conv.bias"]
  for part in ("real", "imag"):
    tables[f"readout/{part}"] = f"post_mp.emb_{part}"
    for number in range(2):
      transform = f"gnn_layers.{2 * number + 1}.feature_transform"
      tables[f"filter_{number}/gains/{part}"] = f"{transform}.emb_{part}"
  for number in range(2):
    theirs = f"gnn_layers.{2 * number + 1}"
    params[f"filter_{number}/factor"] = w[f"{theirs}.factor_split"].T
    for layer in range(2):
      linear[f"filter_{number}/mix_{layer}"] = f"{theirs}.silu_stack.{layer}.0"
  packed = f"{attention}cond_attention.in_proj"
  for name, kernel, bias in zip(
    ("query", "key", "value"), np.split(w[f"{packed}_weight"], 3), np.split(w[f"{packed}_bias"], 3)
  ):
    ours = f"frequencies/attention/{name}"
    params |= {f"{ours}/kernel": kernel.T, f"{ours}/bias": bias}
  for ours, theirs in norms.items():
    params |= {f"{ours}/scale": w[f"{theirs}.weight"], f"{ours}/bias": w[f"{theirs}.bias"]}
  for ours, theirs in slopes.items():
    params[f"{ours}/negative_slope"] = w[f"{theirs}.weight"].reshape(())
  for ours, theirs in tables.items():
    params[f"{ours}/embedding/table"] = w[f"{theirs}.weight"][:OPCODES]
  return winners.tree(params | winners.linear(w, linear))


def test_eigenvectors_and_positions_are_those_of_the_public_code():
  """Which has float32, and vectors of a repeated eigenvalue that are not orthogonal."""
  record = recorded()
  graph, theirs = recorded_graph(record), record["vectors"]
  found = s2gnn.spectrum(graph)
  np.testing.assert_allclose(found.values, record["values"], atol=2e-5)
  assert found.bound == pytest.approx(record["bound"][0], abs=2e-5)
  inside = found.vectors @ (found.vectors.conj().T @ theirs)
  np.testing.assert_allclose(inside, theirs, atol=1e-3)
  gaps = np.diff(found.values, prepend=-1, append=found.bound)
  once = np.minimum(gaps[1:], gaps[:-1]) > 2e-3
  overlap = abs((found.vectors.conj() * theirs).sum(axis=0))
  np.testing.assert_allclose(overlap[once], 1, atol=1e-3)
  positions = s2gnn.positions(graph, found)
  np.testing.assert_allclose(positions[:, once], record["positions"][:, once], atol=1e-3)
  assert once.sum() > 70


def test_scores_are_those_of_the_public_code():
  record = recorded()
  graph = recorded_graph(record)
  columns = s2gnn.spectrum_columns(graph)
  for part, name in enumerate(("positions", "vectors")):
    for number, values in enumerate((record[name].real, record[name].imag)):
      columns[:, (2 * part + number) * K :][:, :K] = values
  columns[:, 4 * K : 5 * K], columns[:, -1] = record["values"], record["bound"]
  feat = np.concatenate([record["features"], columns], axis=1).astype(np.float32)
  batch = system_cases.layout_batch(
    hops=1, graphs=[dataclasses.replace(graph, node_feat=feat)], configs=len(record["scores"])
  )
  network = base.create_network("layout", "S2GNN", op_embed_dim=8, width=8, cutoff=2.5)
  found = scores_of(network, recorded_params(record), batch)[0]
  order = np.rint(batch.target[0]).astype(int) - 1
  np.testing.assert_allclose(found, record["scores"][order], rtol=1e-5, atol=1e-5)
  assert np.ptp(found) > 0.02


# Eigenvectors.


@pytest.mark.parametrize("graph", [*GRAPHS, comb(4, 3)], ids=lambda graph: str(graph.num_nodes))
def test_columns_are_eigenvectors_of_the_largest_component(graph):
  laplacian = slow_laplacian(graph.edge_index, graph.num_nodes)
  eigen = component(laplacian)
  values, vectors, bound = s2gnn.spectrum(graph)
  assert len(values) == len(eigen) and bound == pytest.approx(values[-1] + 1)
  np.testing.assert_allclose(values, np.linalg.eigvalsh(laplacian[np.ix_(eigen, eigen)]), atol=1e-6)
  np.testing.assert_allclose(vectors.conj().T @ vectors, np.eye(len(eigen)), atol=1e-5)
  np.testing.assert_allclose(laplacian @ vectors, vectors * values, atol=1e-5)
  others = np.setdiff1d(np.arange(graph.num_nodes), eigen)
  assert not vectors[others].any()
  columns = s2gnn.spectrum_columns(graph)
  assert columns.shape == (graph.num_nodes, s2gnn.COLUMNS) and columns.dtype == np.float32
  np.testing.assert_allclose(columns[0, 4 * K : 4 * K + len(values)], values, atol=1e-6)
  assert (columns[:, 4 * K + len(values) : -1] == -1).all()


def test_a_program_without_nodes_has_no_columns():
  graph = graph_of([], 1)
  empty = dataclasses.replace(
    graph,
    node_feat=graph.node_feat[:0],
    node_opcode=graph.node_opcode[:0],
    config_node=graph.config_node[:0],
  )
  assert s2gnn.spectrum_columns(empty).shape == (0, s2gnn.COLUMNS)


def test_no_eigenspace_is_cut():
  values, vectors, bound = s2gnn.spectrum(star(150))
  assert len(values) == 1 and vectors.shape == (151, 1)  # of the eigenvalues 0, 1 (149 times), 2
  assert values[0] == pytest.approx(0, abs=1e-6) and bound == pytest.approx(1)
  chain = graph_of([(i + 1, i) for i in range(129)], 130)
  values, _, bound = s2gnn.spectrum(chain)
  assert len(values) == K and values[-1] < bound < 2


def test_large_graphs_have_the_same_eigenvectors_and_keep_them(tmp_path, monkeypatch):
  monkeypatch.setenv(files.CACHE, str(tmp_path))
  graph = comb(35, 7)
  values, vectors, bound = s2gnn.spectrum(graph)
  expected = slow_spectrum(graph.edge_index, graph.num_nodes)
  np.testing.assert_allclose(values, expected[0], atol=1e-7)
  assert bound == pytest.approx(expected[2], abs=1e-7)
  projection = vectors @ vectors.conj().T  # is the same for any eigenvectors
  np.testing.assert_allclose(projection, expected[1] @ expected[1].conj().T, atol=1e-5)
  np.testing.assert_allclose(vectors.conj().T @ vectors, np.eye(len(values)), atol=1e-5)
  (path,) = tmp_path.rglob("*.npz")
  kept = path.read_bytes()
  for content in (kept, kept[:1000]):
    path.write_bytes(content)
    for found, array in zip(s2gnn.spectrum(graph), (values, vectors, bound), strict=True):
      np.testing.assert_array_equal(found, array)
    assert path.stat().st_size == len(kept)
  assert len(list(tmp_path.rglob("*"))) == 2


def test_logarithms_begin_at_one():
  graph = graph_of([], 1)
  feat = np.zeros((1, 140), np.float32)
  feat[0, [3, 21, 22, 23, 61, 133]] = 1, 0.5, 1, np.e, -2, 1
  found = s2gnn.logarithms_from_one(dataclasses.replace(graph, node_feat=feat))
  np.testing.assert_allclose(found[0, [3, 21, 22, 23, 61, 133]], [1, 0.5, 1, 2, -2, 1])
