"""Segmented random graphs and a small model with a pooled readout, for tests of segments."""

from __future__ import annotations

from collections.abc import Sequence
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.support import families, parts, random_graphs
from tpugraphs_jax.data import batching
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.nn.layers import Layouts
from tpugraphs_jax.nn.nodes import Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.segments import batches
from tpugraphs_jax.rankers.segments.batches import SegmentBatch, SegmentedGraph, SegmentSlate
from tpugraphs_jax.rankers.segments.family import SegmentModel, SegmentOptions, Segments

WIDTH = 3
identity = lambda rows: rows


class ToyModel(base.Network):
  """Sums over nodes of their features and configurations, through a nonlinear head."""

  hops = 1

  def setup(self):
    self.node, self.row = nn.Dense(WIDTH), nn.Dense(WIDTH)
    self.hidden, self.out = nn.Dense(4), nn.Dense(1)

  def embed(self, batch, *, train: bool = False):
    del train
    slates = Slates.of(batch)
    static = slates.nodes(self.node(batch.graph.nodes["feat"]))
    rows = Layouts(slates, batch.rows / 6).map(self.row)
    return 0.1 * (pooling.total(static) + pooling.total(rows, configurable=True))

  def score(self, pooled):
    return self.out(nn.tanh(self.hidden(pooled)))[..., 0]


def op_graphs(nodes: Sequence[int] = (14, 25, 33)) -> list[OpGraph]:
  make, made = functools.partial(random_graphs.layout_graph, np.random.default_rng(0)), []
  for i, count in enumerate(nodes):
    sizes = dict(nodes=count, edges=2 * count, configs=5 + i)
    made.append(make(**sizes, config_nodes=range(0, count, 3), name=f"graph{i}"))
  return made


def segmented(
  graph: OpGraph, *, max_nodes: int = 8, fresh: int = 1, segment: np.ndarray | None = None
) -> SegmentedGraph:
  """Prepared contiguous segments, or those given by `segment [N]`."""
  if segment is None:
    segment = batches.partition(graph, method="contiguous", max_nodes=max_nodes)
  pieces = batches.split(graph, segment)
  prepared = [batching.prepare_program(piece, piece.node_feat, hops=1) for piece in pieces]
  return batches.segmented(graph, prepared, fresh=fresh)


def assemble_layout(slots, budget, *, graphs, configs):
  return batching.assemble_layout(slots, budget, graphs=graphs, configs=configs, transform=identity)


def slot(graph: SegmentedGraph, number: int, config_ids, fresh) -> SegmentSlate:
  ids = np.asarray(config_ids)
  target = (graph.configs.labels[ids] / 1000).astype(np.float32)
  return SegmentSlate(graph, ids, target, number, np.asarray(fresh))


def budget_for(graphs: Sequence[SegmentedGraph], slots: int) -> dict[str, int]:
  """Room for any `slots` segments."""
  pieces = [piece for graph in graphs for piece in graph.segments]
  return {key: slots * max(piece.sizes[key] for piece in pieces) + 1 for key in pieces[0].sizes}


def batch_of(
  slots: Sequence[SegmentSlate],
  *,
  graphs: int,
  configs: int,
  fresh: int,
  with_others: bool = False,
  room_for: Sequence[SegmentedGraph] = (),
) -> SegmentBatch:
  """A batch of one device; `room_for` are the graphs of all devices."""
  budget = budget_for(room_for or [slot.graph for slot in slots], graphs * fresh)
  sizes = dict(graphs=graphs, configs=configs, fresh=fresh)
  return batches.assemble(
    slots, budget, **sizes, assemble_layout=assemble_layout, with_others=with_others
  )


@functools.cache
def embed(model):
  return jax.jit(functools.partial(model.apply, method="embed"))


def readouts(model, params, graph: SegmentedGraph, config_ids) -> jax.Array:
  """`[J, n, P]`, every segment in a batch of its own."""
  ids, values = np.asarray(config_ids), []
  budget = budget_for([graph], 1)
  for piece in graph.segments:
    slate = batching.Slate(piece, ids, np.zeros(len(ids), np.float32))
    batch = assemble_layout([slate], budget, graphs=1, configs=len(ids))
    values.append(embed(model)({"params": params}, batch)[0])
  return jnp.stack(values)


def per_device(parts: Sequence[SegmentBatch]) -> SegmentBatch:
  """One batch with a leading axis of devices."""
  return parallel.stack_for_devices(batches.align(parts))


def graphs_of(segments: tuple[int, ...] = (3, 4, 5), fresh: int = 1):
  """Graphs of about 7 nodes per segment."""
  made = op_graphs(nodes=[7 * count - 2 for count in segments])
  graphs = [segmented(graph, max_nodes=7, fresh=fresh) for graph in made]
  assert tuple(len(graph.segments) for graph in graphs) == segments
  return graphs


def model_of(**options) -> SegmentModel:
  """The toy model on segments."""
  return SegmentModel(ToyModel(), SegmentOptions(**options))


def family_of(model: SegmentModel, *, segments: int = 2, configs: int = 2) -> Segments:
  """The family of the toy model, with batches of `segments` and `configs` in evaluation."""
  fields = {"partition": "contiguous", "max_nodes": 8, "fresh": 1}
  for name in ("readout", "aggregation", "keep", "keep_unit"):
    fields[name] = getattr(model.options, name)
  changes = {f"segments.{name}": value for name, value in fields.items()}
  changes |= {"eval.graphs": segments, "eval.configs": configs}
  return families.make("layout", ToyModel(), "gst_ed,ci", **changes)


def scores(family: Segments, params, graphs, config_ids=None) -> list[np.ndarray]:
  return family.scores(
    params, graphs, config_ids or [np.arange(len(graph.configs)) for graph in graphs]
  )


def params_of(model, graphs):
  """Random parameters with standard deviation 0.5, biases too."""
  batch = batch_of([slot(graphs[0], 0, [0, 1], [0])], graphs=1, configs=2, fresh=1)
  return parts.params_of(model, batch, scale=0.5)
