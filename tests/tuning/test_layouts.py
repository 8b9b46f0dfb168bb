import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpugraphs_jax
from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import calls
from tpugraphs_jax.tuning import choosing, layouts

_ARGS = (jnp.ones((6, 16)), jnp.full((16, 12), 0.5), jnp.ones((12, 6)))


def step(x, y, z):
  x = jax.nn.relu(x @ y).reshape(4, 18)
  return x.T @ x, jnp.tanh(x.reshape(6, 12) @ z)


@pytest.fixture
def file(tmp_path):
  choices = choosing.choices(step, *_ARGS)
  numbers = [int(count > 1) for count in choices.options]
  path = tmp_path / "layouts.json"
  graph = hlo.featurize(step, *_ARGS)
  nodes = graph.config_node.tolist()
  change = layouts.Change(
    nodes[:1], "dot_general", ["step.py:7"], (1, 0), ((0, 1), (), ()), (7_000_000, 5_000_000)
  )
  about, call = {"name": "step", "ratio": 0.9}, calls.Call(step, _ARGS, {})
  program = layouts.TunedProgram(
    graph, [change], {nodes[0]: (7_000_000, 5_000_000)}, "1 of 2 tried"
  )
  layouts.save(path, call, choices.choice(numbers), about, program)
  return path


def test_a_function_gets_the_layouts_of_a_file_and_computes_the_same(file):
  applied = tpugraphs_jax.apply(step, file)
  assert applied.__name__ == "step"
  for ours, theirs in zip(jax.jit(applied)(*_ARGS), step(*_ARGS), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
  choices = choosing.choices(step, *_ARGS)
  chosen = choosing.apply(step, choices.choice([int(count > 1) for count in choices.options]))
  constraints = lambda function: jax.jit(function).lower(*_ARGS).as_text().count("LayoutConstraint")
  assert constraints(applied) == constraints(chosen) > 0


@pytest.mark.parametrize(
  "other, message",
  [
    (lambda x, y, z: step(x, y, z)[0] @ _ARGS[0][:1].repeat(18, 0), "without dot_general"),
    (lambda x, y, z: jax.nn.relu(x @ y), "with dot_general"),
    (lambda x, y, z: jax.tree.map(jnp.sin, step(x, y, z)), "whose other operations have changed"),
  ],
)
def test_another_program_is_refused_by_name(file, other, message):
  with pytest.raises(ValueError, match=f"layouts.json was made for 'step'.*{message}"):
    jax.jit(tpugraphs_jax.apply(other, file))(*_ARGS)


def test_other_shapes_are_another_program(file):
  with pytest.raises(ValueError, match=r"without dot_general float32\[6,12\] <- float32\[6,8\]"):
    jax.jit(tpugraphs_jax.apply(step, file))(jnp.ones((6, 8)), jnp.ones((8, 12)), _ARGS[2])


@pytest.mark.parametrize("value", [["often"], [1], {"xla_flag": None}, {"xla_flag": [1]}])
def test_damaged_compiler_options_are_refused_and_older_files_have_none(file, value):
  assert tpugraphs_jax.apply(step, file).compiler_options == {}
  file.write_text(json.dumps(json.loads(file.read_text()) | {"compiler_options": value}))
  with pytest.raises(ValueError, match="layouts.json is damaged.*compiler_options"):
    tpugraphs_jax.apply(step, file)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"groups": [{}], "name": "a"}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
  path = tmp_path / "layouts.json"
  path.write_text(text)
  with pytest.raises(ValueError, match="layouts.json is damaged.*expected a file that Tuned.save"):
    tpugraphs_jax.apply(step, path)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="other.json: no .*, expected a file that Tuned.save"):
    tpugraphs_jax.apply(step, tmp_path / "other.json")


def test_a_file_gives_back_its_program_and_changes(file):
  graph, found = hlo.featurize(step, *_ARGS), layouts.read(file)
  np.testing.assert_array_equal(found.graph.node_feat, graph.node_feat)
  node = int(graph.config_node[0])
  assert found.graph.name == "step" and found.picoseconds == {node: (7_000_000, 5_000_000)}
  assert found.changes[0].nodes == [node] and found.changes[0].orders == ("{1,0}", "{0,1}")
  lines = str(found).splitlines()
  assert lines[0] == "1 of 2 tried"
  assert lines[-1].split() == ["dot_general", "step.py:7", "{1,0}", "->", "{0,1}", "7", "->", "5"]


def test_equal_operations_are_told_apart_by_their_group_and_scope():
  def net(x):
    for layer, size in (("first", 5), ("second", 5), ("head", 3)):
      with jax.named_scope(layer):
        x = x @ jnp.ones((5, size))
    return x

  x = jnp.ones((2, 5))
  choices = choosing.choices(net, x)
  function = choosing.apply(net, choices.choice([1, 1]))
  graph = hlo.featurize(function, x)
  of_group: dict[int, list[int]] = {}
  for node, origin in enumerate(graph.origins):
    if origin.op_name.endswith("/dot_general"):
      of_group.setdefault(choosing.number_in(origin.op_name), []).append(node)
  order = (0, 1), (), ()
  changes = [
    layouts.Change(nodes, str(choices.groups[group]), ["net.py:3"], (1, 0), order, ())
    for group, nodes in of_group.items()
  ]
  table = layouts.TunedProgram(graph, changes, {}, "tried").table()
  assert table.head[:3] == ["group", "changed output of", "scope"]
  assert [(row[0], row[2]) for row in table.rows] == [("0", "first, second"), ("1", "head")]
  # Changes of an explanation have the shape, scope and line of their node.
  explanation = tpugraphs_jax.explain("layout-cpu-measured", graph.with_layouts(9), 3, against=0)
  assert explanation.table().head[2:] == ["shape", "scope", "line"]
  places = {tuple(row[2:]) for row in explanation.table().rows}
  scopes = {scope for _, scope, _ in places}
  assert scopes and scopes <= {"first", "second", "head"}
  assert {line.partition(":")[0] for _, _, line in places} == {"test_layouts.py"}


@pytest.mark.parametrize(
  "damage",
  [
    lambda program: program.pop("module"),
    lambda program: program.update(module="AAAA"),
    lambda program: program.update(module="no base64"),
    lambda program: program.update(picoseconds=[[0, 1]]),
    lambda program: program.update(picoseconds=[[10**6, 1, 2]]),
    lambda program: program["changes"][0].update(nodes=[10**6]),
    lambda program: program["changes"][0].update(picoseconds=[1]),
    lambda program: program["changes"][0].update(after=[]),
    lambda program: program.update(cycles=program.pop("picoseconds")),  # of an earlier version
    lambda program: program["changes"][0].update(other=1),
  ],
)
def test_a_damaged_program_is_refused_by_the_name_of_its_file(file, damage):
  record = json.loads(file.read_text())
  damage(record["program"])
  file.write_text(json.dumps(record))
  with pytest.raises(ValueError, match="layouts.json is damaged.*Tuned.save"):
    layouts.read(file)


def test_a_file_says_what_it_was_made_for(file):
  record = json.loads(file.read_text())
  assert record["name"] == "step" and record["ratio"] == 0.9
  assert record["groups"][0]["operation"] == (
    "dot_general float32[6,12] <- float32[6,16], float32[16,12]"
  )


def _saved(path, function, args):
  found, call = choosing.choices(function, *args), calls.Call(function, args, {})
  program = layouts.TunedProgram(hlo.featurize(function, *args), [], {}, "tried")
  layouts.save(path, call, found.choice(found.options - 1), {"name": "step"}, program)
  return path


def test_an_unchanged_program_is_taken_with_scalars_and_jitted_or_not(tmp_path):
  function = lambda x, w, s: jnp.tanh(x @ w) * s
  args = (jnp.ones((8, 16)), jnp.ones((16, 4)))
  wanted = function(*args, 2.0)
  for tuned, scalar in (
    (function, jax.ShapeDtypeStruct((), jnp.float32)),
    (jax.jit(function), 2.0),
  ):
    path = _saved(tmp_path / "layouts.json", tuned, (*args, scalar))
    for version in (function, jax.jit(function)):
      for given in (2.0, jnp.float32(2)):
        found = jax.jit(tpugraphs_jax.apply(version, path))(*args, given)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_file_has_no_constants_of_the_program(tmp_path):
  table = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)  # 512 kB
  function = lambda x: jnp.tanh(x @ table)
  args = (jnp.ones((4, 512)),)
  path = _saved(tmp_path / "layouts.json", function, args)
  assert path.stat().st_size < 20_000
  graph, found = hlo.featurize(function, *args), layouts.read(path).graph
  for field in ("node_feat", "node_opcode", "edge_index", "config_node"):
    np.testing.assert_array_equal(getattr(found, field), getattr(graph, field))
  assert [origin.where for origin in found.origins] == [origin.where for origin in graph.origins]
  applied = tpugraphs_jax.apply(function, path)
  np.testing.assert_allclose(jax.jit(applied)(*args), function(*args), rtol=1e-4)


@pytest.mark.parametrize("orders", [[], [[0, 0], [], []], [[7], [], []], [[1, 0]], [[-1], [], []]])
def test_orders_that_are_not_of_the_arrays_of_an_operation_are_refused(file, orders):
  record = json.loads(file.read_text())
  record["groups"][0]["orders"] = orders
  file.write_text(json.dumps(record))
  with pytest.raises(ValueError, match="layouts.json"):
    jax.jit(tpugraphs_jax.apply(step, file))(*_ARGS)
