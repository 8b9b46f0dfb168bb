from pathlib import Path
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax import hlo
from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.hlo import __main__ as cli
from tpugraphs_jax.hlo import proto

_SAMPLE = Path(__file__).parents[1] / "data" / "hlo" / "fuzz01.hlo.pb"
_X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
_W = jax.ShapeDtypeStruct((8, 16), jnp.float32)
_TEXT = """HloModule double

ENTRY main {
  x = f32[3,5]{1,0} parameter(0)
  ROOT twice = f32[3,5]{1,0} add(x, x)
}
"""


def _layer(x, w):
  return jax.nn.relu(x @ w)


def _opcodes(graph):
  return {each.opcode for owner in graph.module.computations for each in owner.instructions}


def _assert_same_graph(one, other):
  np.testing.assert_array_equal(one.node_feat, other.node_feat)
  np.testing.assert_array_equal(one.node_opcode, other.node_opcode)
  np.testing.assert_array_equal(one.edge_index, other.edge_index)


def test_a_function_a_jitted_function_and_its_lowering_give_one_graph():
  graph = hlo.featurize(_layer, _X, _W)
  assert "dot" in _opcodes(graph)
  assert [4, 16] in graph.node_feat[:, 21:23].tolist()
  _assert_same_graph(graph, hlo.featurize(jax.jit(_layer), _X, _W))
  _assert_same_graph(graph, hlo.featurize(jax.jit(_layer).lower(_X, _W)))


def test_optimized_gives_the_compiled_module():
  lowered = jax.jit(_layer).lower(_X, _W)
  compiled = hlo.featurize(lowered.compile())
  _assert_same_graph(compiled, hlo.featurize(_layer, _X, _W, optimized=True))
  _assert_same_graph(compiled, hlo.featurize(lowered, optimized=True))
  _assert_same_graph(compiled, hlo.featurize(lowered.compile(), optimized=True))
  assert _opcodes(compiled) != _opcodes(hlo.featurize(_layer, _X, _W))


def test_text_and_a_file_with_text_are_parsed(tmp_path):
  path = tmp_path / "double.txt"
  path.write_text(_TEXT)
  graph = hlo.featurize(_TEXT)
  assert graph.name == "double"
  assert graph.node_opcode.tolist() == [opcode_ids()["parameter"], opcode_ids()["add"]]
  assert graph.edge_index.tolist() == [[1, 0]]
  assert graph.node_feat[:, 21:23].tolist() == [[3, 5], [3, 5]]
  _assert_same_graph(graph, hlo.featurize(path))
  _assert_same_graph(graph, hlo.featurize(str(path)))


def test_bytes_and_files_give_the_same_graph_named_after_the_file(tmp_path):
  data, path = _SAMPLE.read_bytes(), tmp_path / "program.hlo.pb"
  path.write_bytes(data)
  assert hlo.featurize(path).name == "program"
  for source in (data, bytearray(data), memoryview(data)):
    graph = hlo.featurize(source)
    assert graph.name == "fuzz1"
    _assert_same_graph(graph, hlo.featurize(path))


def test_a_dump_of_xla_gives_the_module_in_it():
  inner = _SAMPLE.read_bytes()
  length, size = b"", len(inner)
  while size > 127:
    length, size = length + bytes([size % 128 + 128]), size // 128
  buffer_assignment = b"\x1a\x04\x0a\x02\x08\x05"  # field 3 of HloProto
  dump = b"\x0a" + length + bytes([size]) + inner + buffer_assignment
  _assert_same_graph(hlo.featurize(dump), hlo.featurize(inner))


def test_tuning_data_is_not_taken_for_a_module():
  module = proto.HloModuleProto.FromString(_SAMPLE.read_bytes())
  entry = proto.ModuleTuningData(module=module, fingerprint=5)
  for message in (entry, proto.TuningData(modules=[entry])):
    with pytest.raises(ValueError, match="read_tuning"):
      hlo.featurize(message.SerializeToString())


def test_what_cannot_be_read_is_named(tmp_path):
  with pytest.raises(FileNotFoundError):
    hlo.featurize(tmp_path / "missing.pb")
  with pytest.raises(ValueError, match="int"):
    hlo.featurize(3)
  with pytest.raises(ValueError, match="arguments"):
    hlo.featurize(b"", 1, 2)
  with pytest.raises(ValueError, match="optimized"):
    hlo.featurize(b"", optimized=True)


def test_jax_is_not_imported_for_files():
  code = (
    "import sys; from tpugraphs_jax import hlo; hlo.featurize(b''); sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_prints_a_file(capsys):
  assert cli.main(["show", str(_SAMPLE.with_name("text_ops1.hlo.pb"))]) == 0
  assert capsys.readouterr().out.startswith("text_ops1: 58 nodes, 59 edges")
