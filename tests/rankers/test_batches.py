"""Every family draws slates and their sizes, and assembles them into batches."""

import numpy as np
import pytest

from tests.support import families, random_graphs, segment_cases, table_cases
from tpugraphs_jax.data import batching, plan, reduction
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.layout.res_model import ResModel
from tpugraphs_jax.rankers.segments.batches import HeadGraph
from tpugraphs_jax.rankers.segments.family import HeadFamily

CONFIGS = 4
KINDS = ("tile", "layout", "segments", "recomputed", "tables", "head")


def programs(**changes):
  return families.make("layout", segment_cases.ToyModel(), "full,ci", **NEIGHBOURS, **changes)


def segments(**changes):
  fields = {"segments.partition": "contiguous", "segments.max_nodes": 8, "segments.fresh": 2}
  fields |= NEIGHBOURS | changes
  return families.make("layout", segment_cases.ToyModel(), "gst_ed,ci", **fields)


NEIGHBOURS = {"data.neighbour_slots": 2}
FAMILIES = {
  "tile": families.make("tile", base.Network(), **NEIGHBOURS),
  "layout": programs(),
  "segments": segments(),
  "recomputed": segments(**{"segments.recompute": True, "segments.keep": 1.0}),
  "tables": families.of_config("layout", "tables,ci", **NEIGHBOURS),
  "head": HeadFamily(segments()),
}


def graphs_of(kind):
  rng = np.random.default_rng(0)
  if kind == "tile":
    return [random_graphs.tile_graph(rng, nodes=n, edges=2 * n, configs=9) for n in (5, 9, 14)]
  if kind == "tables":
    return [table_cases.program(seed, nodes=20 + 5 * seed) for seed in range(3)]
  return segment_cases.op_graphs(nodes=(20, 25, 33))


def prepared_of(kind):
  if kind == "head":
    return [
      HeadGraph(
        graph.name, graph.configs, np.full((len(graph.configs), 3), i, np.float32), 2, {"nodes": 1}
      )
      for i, graph in enumerate(graphs_of("layout"))
    ]
  return [FAMILIES[kind].prepare(graph, graph.node_feat) for graph in graphs_of(kind)]


def drawing(kind, graphs):
  sampler = plan.ConfigSampler(
    [graph.configs for graph in graphs],
    count=CONFIGS,
    sampling="uniform",
    targets=lambda configs, ids: random_graphs.config_runtime(configs)[ids].astype(np.float32),
  )
  return FAMILIES[kind].draw(graphs, sampler)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slate_is_a_pure_function_of_the_generator(kind):
  graphs = prepared_of(kind)
  draw = drawing(kind, graphs)
  for number, graph in enumerate(graphs):
    first_draft, second_draft = (draw(number, np.random.default_rng(7), 0) for _ in range(2))
    assert first_draft.sizes == second_draft.sizes
    first, second = first_draft.finish(), second_draft.finish()
    assert first.graph is graph and first.graph_id == number
    np.testing.assert_array_equal(first.config_ids, second.config_ids)
    np.testing.assert_array_equal(
      first.target, random_graphs.config_runtime(graph.configs)[first.config_ids]
    )
    assert len(set(first.config_ids.tolist())) == CONFIGS


@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_that_are_drawn_hold_the_batch(kind):
  graphs = prepared_of(kind)
  draw, rng = drawing(kind, graphs), np.random.default_rng(1)
  for _ in range(5):
    drawn = [draw(number, rng, 0) for number in range(3)]
    slates = [draft.finish() for draft in drawn]
    (budget,) = plan.choose_budgets([batching.add_sizes([draft.sizes for draft in drawn])])
    batch = FAMILIES[kind].assemble(slates, budget, graphs=4, configs=CONFIGS + 1)
    assert batch.target.shape == batch.config_mask.shape == (4, CONFIGS + 1)
    assert batch.config_mask[:3, :CONFIGS].all() and batch.config_mask.sum() == 3 * CONFIGS
    for row, slate in zip(batch.target, slates):
      np.testing.assert_array_equal(row[:CONFIGS], slate.target)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_several_devices_have_one_structure(kind):
  graphs = prepared_of(kind)
  draw, family = drawing(kind, graphs), FAMILIES[kind]
  drawn = [draw(number, np.random.default_rng(2), 0) for number in (0, 2)]
  sizes = {key: max(draft.sizes[key] for draft in drawn) for key in drawn[0].sizes}
  (budget,) = plan.choose_budgets([sizes])
  batches = [
    family.assemble([draft.finish()], budget, graphs=1, configs=CONFIGS) for draft in drawn
  ]
  stack = family.stack if kind in ("segments", "recomputed") else parallel.stack_for_devices
  stack([*batches, *batches])  # for four devices; refuses arrays of several shapes


def test_segments_take_what_their_fresh_ones_take_and_recomputed_ones_what_the_largest_do():
  graphs = prepared_of("segments")
  for kind in ("segments", "recomputed"):
    drawn = drawing(kind, graphs)(2, np.random.default_rng(0), 0)
    fresh = drawn.finish().fresh
    expected = batching.total_sizes([graphs[2].segments[number] for number in fresh])
    assert drawn.sizes == (expected if kind == "segments" else graphs[2].sizes)
    assert len(fresh) == 2 and (np.diff(fresh) > 0).all()


def test_blocks_are_drawn_for_networks_that_look_at_them():
  raw = graphs_of("layout")[2]
  graph = programs().prepare(raw, raw.node_feat)
  assert drawing("layout", [graph])(0, np.random.default_rng(0), 0).finish().block is None
  family = families.make(
    "layout", ResModel(dropout="dropout"), "full,ci", **{"batch.keep_nodes": 10}
  )
  starts = set()
  for seed in range(30):
    start, stop = family.draw_block(graph, np.random.default_rng(seed))
    assert start % 10 == 0 and stop == min(start + 10, 33)
    starts.add(start)
  assert starts == {0, 10, 20, 30}


@pytest.mark.parametrize("kind", ["layout", "segments", "tables"])
def test_graphs_are_reduced_before_they_are_prepared(kind):
  options = reduction.Reduction(graph_reduction="config_neighborhood", reduction_hops=1)
  changes = {"data.graph_reduction": "config_neighborhood", "data.reduction_hops": 1}
  family = {
    "layout": programs,
    "segments": segments,
    "tables": lambda **changes: families.of_config("layout", "tables,ci", **changes),
  }[kind]
  graph = table_cases.program(1, nodes=40, edges=20, config_nodes=[0, 1])
  found = family(**changes).prepare(graph, graph.node_feat)
  expected = reduction.reduce_graph(graph, options).graph
  assert len(found.opcode) == expected.num_nodes < 40
  np.testing.assert_array_equal(found.opcode, expected.node_opcode)


def test_widths_of_graphs_in_one_batch_are_not_added_up():
  sizes = [{"nodes": 3, "choices": 5}, {"nodes": 4, "choices": 2}]
  assert batching.add_sizes(sizes) == {"nodes": 7, "choices": 5}
