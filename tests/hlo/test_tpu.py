"""Stages and kernels of the TPU compiler. Tests that compile are skipped without libtpu."""

import json
import os

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.extend import backend
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, hlo_modules, recorded
from tests.support.hlo_modules import network
from tpugraphs_jax import collect, hlo
from tpugraphs_jax.columns import NODE
from tpugraphs_jax.hlo import meshes, tpu, tpu_kernels
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.tuning import compiler, labels, problem

_ARGS = (
  jax.ShapeDtypeStruct((4, 14, 14, 16), jnp.float32),
  jax.ShapeDtypeStruct((3, 3, 16, 24), jnp.float32),
  jax.ShapeDtypeStruct((14 * 14 * 24, 10), jnp.float32),
)


def _window(cycles, **bounds):
  config = {"estimated_cycles": str(cycles)}
  for name in ("kernel", "output", "input"):
    config[f"{name}_window_bounds"] = [str(bound) for bound in bounds.get(name, ())]
  return json.dumps({"window_config": config}).encode()


def _scalar(opcode, id, *, value=None, **fields):
  node = hlo_modules.instruction(opcode, id=id, **fields)
  node.shape.element_type = 4  # s32
  if value is not None:
    node.literal.s32s.append(value)
  return node


def _looping_module(*, config=b"", start=None, bound=0, step=1, direction="LT"):
  """A loop that counts from `start`, or from an argument."""
  body = hlo_modules.computation(
    _scalar("parameter", id=1),
    hlo_modules.instruction("tanh", id=2, operands=[1], backend_config=_window(100)),
    _scalar("constant", id=9, value=step),
    _scalar("add", id=10, operands=[1, 9]),
    name="body",
    id=1,
  )
  condition = hlo_modules.computation(
    _scalar("parameter", id=3),
    _scalar("constant", id=4, value=bound),
    hlo_modules.instruction("compare", id=5, operands=[3, 4], comparison_direction=direction),
    name="condition",
    id=2,
  )
  condition.instructions[-1].shape.element_type = 1  # pred
  first = _scalar("parameter", id=11) if start is None else _scalar("constant", id=11, value=start)
  main = hlo_modules.computation(
    hlo_modules.instruction("parameter", id=6),
    hlo_modules.instruction("copy", id=7, operands=[6], backend_config=_window(7)),
    first,
    _scalar("while", id=8, operands=[11], callees=[1, 2], backend_config=config),
    id=3,
  )
  module = hlo_modules.module(body, condition, main)
  module.entry_computation_id = 3
  return module


def _sums(module):
  """Cycles, kernels with tiles, loops of unknown length, and kernels without an estimate."""
  found = tpu_kernels.estimated_cycles(module)
  loops = sum(lacking.kind == "loop" for lacking in found.uncounted)
  return found.cycles, len(found.by_kernel), loops, found.without_estimate


@pytest.mark.parametrize(
  "options, expected",
  [
    (dict(start=0, bound=5), (507, 2, 0, 0)),
    (dict(start=5, bound=0, step=-2, direction="GE"), (307, 2, 0, 0)),
    (dict(config=b'{"known_trip_count":{"n":"3"}}', bound=5), (307, 2, 0, 0)),
    (dict(config=b'{"known_trip_count":{"n":"0"}}', bound=5), (7, 2, 0, 0)),
    (dict(bound=5), (107, 2, 1, 0)),
  ],
)
def test_the_body_of_a_loop_counts_as_often_as_it_turns(options, expected):
  assert _sums(_looping_module(**options)) == expected


def test_a_kernel_without_an_estimate_is_counted_apart():
  module = _looping_module(start=0, bound=5)
  tanh = module.computations[0].instructions[1]
  tanh.backend_config = b"{uplo = 76 : ui8}"  # MLIR of an FFI call
  assert tpu_kernels.window(tanh) is None
  tanh.backend_config = b'{"window_config": 5}'
  with pytest.raises(ValueError, match="backend_config"):
    tpu_kernels.window(tanh)
  tanh.backend_config = _window(2**63 - 1)
  assert tpu_kernels.window(tanh).estimated_cycles is None
  assert _sums(module) == (7, 2, 0, 1)


@pytest.mark.parametrize("cycles", [2**63 - 1, 2**62, -1])
def test_a_saturated_number_is_no_estimate(cycles):
  module = _looping_module(start=0, bound=5)
  module.computations[2].instructions[1].backend_config = _window(cycles)
  assert _sums(module) == (500, 2, 0, 1)


def test_a_kernel_that_is_not_tiled_has_no_estimate():
  json_of_kernel = b'{"used_scoped_memory_configs":[]}'
  kernel = {"operands": [6], "backend_config": json_of_kernel}
  buffer = hlo_modules.instruction("custom-call", id=9, shape=[8], backend_config=json_of_kernel)
  buffer.custom_call_target = "AllocateBuffer"
  main = hlo_modules.computation(
    hlo_modules.instruction("parameter", id=6, shape=[8]),
    hlo_modules.instruction("custom-call", id=7, shape=[8], **kernel),
    hlo_modules.instruction("add", id=8, shape=[], **kernel),  # a scalar
    buffer,
    hlo_modules.instruction("copy-start", id=10, shape=[8], operands=[7]),
    hlo_modules.instruction("sort", id=11, shape=[4096], operands=[7]),
    hlo_modules.instruction("sort", id=12, shape=[1024], operands=[7]),  # a register
  )
  module = hlo_modules.module(main)
  module.entry_computation_id = main.id
  assert _sums(module) == (0, 0, 0, 2)


def test_kernels_have_the_compilers_window_and_what_is_inside_them():
  reducer = hlo_modules.computation(hlo_modules.instruction("parameter", id=1), name="region", id=1)
  fused = hlo_modules.computation(
    hlo_modules.instruction("parameter", id=2, shape=[8, 128]),
    hlo_modules.instruction("reduce", id=3, operands=[2], callees=[1], backend_config=_window(3)),
    name="fused",
    id=2,
  )
  main = hlo_modules.computation(
    hlo_modules.instruction("parameter", id=4, shape=[8, 128]),
    hlo_modules.instruction("copy", id=5, operands=[4], backend_config=_window(9, output=[2, 1])),
    hlo_modules.instruction(
      "fusion",
      id=6,
      operands=[5],
      callees=[2],
      backend_config=_window(20, kernel=[3, 4], output=[5], input=[2, 2]),
    ),
    id=3,
  )
  found = tpu_kernels.module_kernels(hlo_modules.module(reducer, fused, main))
  assert [kernel.graph.name for kernel in found] == ["copy.5", "fusion.6"]
  assert [kernel.estimated_cycles for kernel in found] == [9, 20]
  assert [kernel.graph.num_nodes for kernel in found] == [2, 3]
  assert found[0].graph.edge_index.tolist() == [[1, 0]]
  feat = found[1].graph.configs.config_feat
  assert feat.tolist() == [
    [3, 4, 0, 0, 0, 0, 7, 12, 5, 0, 0, 0, 0, 0, 5, 5, 2, 2, 0, 0, 0, 0, 4, 4]
  ]
  assert not found[0].graph.configs.is_labelled


def test_names_and_lines_of_the_user_are_beside_the_nodes():
  graph = hlo.featurize(network, *_ARGS)
  (origin,) = [
    graph.origins[index]
    for index in graph.config_node
    if graph.origins[index].name.startswith("conv")
  ]
  assert origin.where.startswith("hlo_modules.py:")
  assert origin.op_name.endswith("conv_general_dilated")
  assert len(graph.origins) == graph.num_nodes


def test_a_missing_compiler_and_an_unknown_target_are_refused(monkeypatch):
  for target in ("cpu", "v7", "gpu:v3", 6):
    with pytest.raises(ValueError, match=f"{target}.* TPU generation, .* v3, "):
      hlo.featurize(network, *_ARGS, target=target)
  with pytest.raises(ValueError, match="bytes"):
    hlo.featurize(b"", target="v3")
  monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="libtpu"):
    tpu.full_name("v3")


@recorded.needs_libtpu
def test_compiling_for_a_target_writes_nothing_where_there_is_no_tpu(tmp_path):
  code = """
import jax
from jax.experimental.pallas import tpu as pltpu
from jax.extend import backend
import tpugraphs_jax
from tpugraphs_jax.hlo import tpu
x = jax.random.key(0)
for _ in range(2):
  tpu.compile_function(lambda x: 2 * x, (jax.ShapeDtypeStruct((8,), "float32"),), "tpu:v3")
"""
  kept = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("JAX_PLATFORMS", "XLA_FLAGS", "TPU_"))
  }
  cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
  ended = commands.python(
    "-c", code, env=kept | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  )
  assert (ended.returncode, ended.stderr) == (0, "")


def test_a_module_takes_the_layouts_of_instructions_of_the_same_name_and_shape():
  def module(*layouts, extra=()):
    nodes = [
      hlo_modules.instruction("copy", id=place, shape=[place + 2, 3])
      for place in range(len(layouts))
    ]
    for node, layout in zip(nodes, layouts):
      node.shape.layout.minor_to_major.extend(layout)
    return hlo_modules.module(hlo_modules.computation(*extra, *nodes, id=1))

  assigned = module((0, 1), (0, 1), (0, 1), extra=[hlo_modules.instruction("copy", id=9)])
  assigned.computations[0].instructions[2].shape.dimensions[0] = 9  # of another shape
  found = tpu.with_layouts_of(
    module((1, 0), (1, 0), (1, 0), (1, 0)).SerializeToString(), assigned.SerializeToString()
  )
  assert hlo.featurize(found).node_feat[:, NODE["minor_to_major"]][:, :2].tolist() == [
    [0, 1],
    [1, 0],
    [0, 1],
    [1, 0],
  ]


@recorded.needs_libtpu
def test_the_graph_for_a_target_is_the_one_before_layout_assignment():
  graph = hlo.featurize(network, *_ARGS, target="v3")
  layouts = graph.node_feat[graph.config_node][:, NODE["minor_to_major"]]
  assert [3, 0, 2, 1] in layouts[:, :4].tolist()  # of the convolution, as the compiler assigns it
  names = [graph.origins[node].name for node in graph.config_node]
  assert sum(name.startswith("conv") for name in names) == 1
  assert graph.num_nodes < hlo.featurize(network, *_ARGS, target="v3", optimized=True).num_nodes


@recorded.needs_libtpu
def test_estimates_are_the_same_twice_and_layouts_change_them():
  found = collect.choices(network, *_ARGS, operands=True)
  default = collect.apply(network, found.default)
  worst = collect.apply(network, found.choice(found.options - 1))
  programs = [
    tpu.compile_function(function, _ARGS, "tpu:v3")
    for function in (network, default, default, worst)
  ]
  cycles = [
    tpu_kernels.estimated_cycles(hlo.featurize(program.module).module).cycles
    for program in programs
  ]
  assert cycles[0] == cycles[1] == cycles[2] > 0
  assert programs[1].optimal_seconds == programs[2].optimal_seconds > 0
  assert cycles[3] != cycles[0]


@recorded.needs_libtpu
def test_the_times_of_all_kernels_are_of_the_program_and_most_of_its_nodes_and_groups():
  label = labels.create("tpu_estimate", target="v3", seed=0)
  with label.open() as opened:
    found = problem.Problem(Call(network, _ARGS), opened)
    ((_, raw),) = found.label_records([found.default])
  picoseconds = sum(kernel["picoseconds"] for kernel in raw["kernels"])
  assert 0 < picoseconds <= label.value(raw)
  assert {0, 2} <= {kernel["group"] for kernel in raw["kernels"]} <= {0, 1, 2, None}
  nodes = set().union(*(kernel["nodes"] for kernel in raw["kernels"]))
  assert set(found.graph.config_node.tolist()) <= nodes


@recorded.needs_libtpu
def test_nodes_of_the_compilers_graph_know_their_group():
  found = collect.choices(network, *_ARGS)
  default = collect.apply(network, found.default)
  graph = hlo.featurize(default, *_ARGS, target="v3")
  nodes = problem.node_options(graph, found)
  assert sorted(node.group for node in nodes) == [0, 1, 2]
  options = problem.visible_options(nodes, 3)
  assert [len(numbers) for numbers in options] == found.options.tolist()
  kernel_cycles = [kernel.estimated_cycles for kernel in hlo.kernels(default, *_ARGS, target="v3")]
  assert kernel_cycles and min(kernel_cycles) > 0
  assert np.isfinite(graph.node_feat).all()


@recorded.needs_libtpu
@pytest.mark.parametrize("is_abstract", [True, False])
def test_code_that_asks_for_its_device_gets_that_of_the_target_also_on_a_mesh(is_abstract):
  spec = jax.sharding.PartitionSpec("x")
  mesh = jax.make_mesh((4,), ("x",))
  mesh = mesh.abstract_mesh if is_abstract else mesh
  for target, generation in (("v6e", 6), ("v5e", 5)):
    found = []

    def ask(x, found=found):
      info = pltpu.get_tpu_info()
      found.append((backend.get_default_device().platform, jax.default_backend(), info.generation))
      return x

    step = jax.jit(jax.shard_map(ask, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    call = Call(step, (jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),))
    placement = meshes.place(mesh, f"tpu:{target}:2x2")
    compiler.lower(call, f"tpu:{target}:2x2", placement=placement)
    assert set(found) == {("tpu", "tpu", generation)}
  assert backend.get_default_device().platform == "cpu"
