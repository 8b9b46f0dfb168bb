import gzip
from pathlib import Path
import subprocess

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, comparing
from tpugraphs_jax import hlo
from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.hlo import proto, sources, text
from tpugraphs_jax.hlo.__main__ import main
from tpugraphs_jax.infra import machine

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
  return {
    instruction.opcode for owner in graph.module.computations for instruction in owner.instructions
  }


def _assert_same_graph(first, second):
  np.testing.assert_array_equal(first.node_feat, second.node_feat)
  np.testing.assert_array_equal(first.node_opcode, second.node_opcode)
  np.testing.assert_array_equal(first.edge_index, second.edge_index)


def test_a_function_a_jitted_function_and_its_lowering_give_one_graph():
  graph = hlo.featurize(_layer, _X, _W)
  assert "dot" in _opcodes(graph)
  assert [4, 16] in graph.node_feat[:, 21:23].tolist()
  _assert_same_graph(graph, hlo.featurize(jax.jit(_layer), _X, _W))
  _assert_same_graph(graph, hlo.featurize(jax.jit(_layer).lower(_X, _W)))
  _assert_same_graph(graph, hlo.featurize(jax.jit(_layer).trace(_X, _W)))


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


@pytest.mark.parametrize(
  "text",
  [
    f"// RUN: opt\n/* of a test */\n\n{_TEXT}",
    f"\ufeff\n# written by hand\n; twice\n{_TEXT}",
    f"I0000 00:00:01.5 9 service.cc:1] XLA\r\n{_TEXT}".replace("\n", "\r\n"),
    _TEXT.partition("\n")[2],
    _TEXT.partition("\n")[2].strip().replace("\n", " "),
  ],
  ids=["comments", "mark", "log", "headless", "line"],
)
def test_text_below_comments_or_without_its_first_line_is_parsed(text, tmp_path):
  (path := tmp_path / "double.txt").write_text(text, encoding="utf-8")
  graph = hlo.featurize(text if "{" in text.partition("\n")[0] else path)
  assert graph.node_opcode.tolist() == [opcode_ids()["parameter"], opcode_ids()["add"]]


@pytest.mark.parametrize("text", ["", " \n", "\ufeff\n"])
def test_a_file_without_content_is_refused(text, tmp_path):
  (path := tmp_path / "empty.hlo").write_text(text, encoding="utf-8")
  for source in (path, text, text.encode()):
    with pytest.raises(ValueError, match="empty"):
      hlo.featurize(source)


def test_stablehlo_gives_the_graph_of_its_function(tmp_path):
  lowered = jax.jit(_layer).lower(_X, _W)
  exported = export.export(jax.jit(_layer))(_X, _W)
  bytecode = exported.mlir_module_serialized
  # As FlatBuffers stores an array: its length in four bytes, then its values.
  artifact = b"<\0\0\0" + bytes(40) + len(bytecode).to_bytes(4, "little") + bytecode + b"main"
  (path := tmp_path / "layer.mlir").write_text(lowered.as_text(debug_info=True))
  expected = hlo.featurize(lowered)
  for source in (lowered.as_text(), path, bytecode, artifact, exported):
    graph = hlo.featurize(source)
    _assert_same_graph(graph, expected)
    assert graph.stage == expected.stage


def test_other_mlir_is_named_with_what_to_write():
  with pytest.raises(ValueError, match=r"StableHLO.*as_text\('hlo'\)"):
    hlo.featurize("module {\n  foo.bar\n}\n")


def _field(number, data):
  """A field of a serialized message that holds bytes."""
  length, size = b"", len(data)
  while size > 127:
    length, size = length + bytes([size % 128 + 128]), size // 128
  return bytes([8 * number + 2]) + length + bytes([size]) + data


def test_a_dump_or_a_snapshot_of_xla_gives_the_module_in_it():
  inner, literal = _SAMPLE.read_bytes(), b"\x0a\x02\x10\x0b"
  dump = _field(1, inner) + _field(3, b"\x0a\x02\x08\x05")  # with a buffer assignment
  snapshot = _field(1, dump) + 2 * _field(2, literal) + _field(3, literal) + _field(4, b"cpu")
  unoptimized = _field(1, inner) + _field(2, _field(1, literal)) + b"\x18\x01"
  for data in (dump, snapshot, unoptimized):
    _assert_same_graph(hlo.featurize(data), hlo.featurize(inner))


def test_a_compressed_module_is_read(tmp_path):
  data = _SAMPLE.read_bytes()
  (path := tmp_path / "program.hlo.pb.gz").write_bytes(gzip.compress(data))
  graph = hlo.featurize(path)
  _assert_same_graph(graph, hlo.featurize(data))
  assert graph.name == "program"
  parts = gzip.compress(data[:50]) + gzip.compress(data[50:])  # as parallel compressors write
  _assert_same_graph(hlo.featurize(parts), graph)
  for damaged in (gzip.compress(data)[:-9], b"\x1f\x8b" + data):
    with pytest.raises(ValueError, match="write it again"):
      hlo.featurize(damaged)


def test_a_folder_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="a folder, expected a serialized HLO module"):
    hlo.featurize(tmp_path)


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
  with pytest.raises(ValueError, match="no instruction.*expected.*again"):
    hlo.featurize(_SAMPLE.read_bytes()[:-7])


def test_jax_is_not_imported_for_files():
  code = (
    f"import sys; from tpugraphs_jax import hlo; hlo.featurize({str(_SAMPLE)!r}); "
    "sys.exit('jax' in sys.modules)"
  )
  assert commands.python("-c", code).returncode == 0


def test_the_command_prints_a_file(capsys):
  assert main(["show", str(_SAMPLE.with_name("text_ops1.hlo.pb"))]) == 0
  assert capsys.readouterr().out.startswith("text_ops1: 58 nodes, 59 edges")


_HOSTILE = {
  "zeros": b"\0",
  "letters": b"a",
  "lines": b"\n",
  "spaces": b" ",
  "tabs and lines": b"\t\n",
  "comments of StableHLO": b"//\n",
  "comments of HLO": b"#\n;x\n",
  "entries": b"ENTRY\n",
  "modules": b"HloModule x\n",
  "commas": b", ",
  "braces": b"{",
  "not ASCII": "é".encode(),
  "not in Unicode's first plane": "𝄞".encode(),
  "UTF-16": b"\xff\xfe\n\0",
  "computations": b"\x1a\0",
  "strings": b"\x0a\0",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("content", _HOSTILE.values(), ids=_HOSTILE)
def test_reading_takes_four_times_the_bytes_at_most(tmp_path, monkeypatch, content, packed):
  """Also of a small gz file that unpacks to much more."""
  monkeypatch.setattr(text, "module_of", lambda source, where, kind=text.HLO: source)
  size = 1 << 22
  data = content * (size // len(content))
  path = tmp_path / ("x.hlo.gz" if packed else "x.hlo")
  path.write_bytes(gzip.compress(data, 1) if packed else data)
  del data
  comparing.assert_reading_takes(4, size, lambda: sources.load_file(path))


@pytest.mark.parametrize("content", _HOSTILE.values(), ids=_HOSTILE)
def test_a_text_is_prepared_for_its_parser_within_its_bytes(monkeypatch, content):
  parsed = []

  def run(command, *, input, **options):
    parsed.append(len(input))
    return subprocess.CompletedProcess(command, 3, b"refused", b"")

  monkeypatch.setattr(subprocess, "run", run)
  data = content * ((1 << 22) // len(content))
  for kind in (text.HLO, text.STABLEHLO):
    comparing.assert_reading_takes(
      3, len(data), lambda kind=kind: text.module_of(data, "x", kind=kind)
    )
  assert parsed


def _field(number, content):
  """A field of a message, of bytes."""
  size, length = len(content), bytearray()
  while size > 127:
    length.append(size & 127 | 128)
    size >>= 7
  return bytes([number << 3 | 2]) + bytes([*length, size]) + content


@pytest.mark.parametrize("name", ["computations", "instructions", "sizes"])
def test_a_message_of_tiny_parts_is_refused_by_another_process(tmp_path, name):
  tiny = {
    "computations": b"\x1a\0" * (1 << 20),
    "instructions": _field(3, b"\x12\0" * (1 << 20)),
    "sizes": _field(3, _field(2, _field(14, b"\x01" * (1 << 21)))),
  }[name]
  (tmp_path / "x.hlo.pb").write_bytes(tiny)
  with pytest.raises(ValueError, match=r"x\.hlo\.pb: no instruction .* times as much memory"):
    hlo.featurize(tmp_path / "x.hlo.pb")


def test_a_large_module_is_read_as_a_small_one(tmp_path):
  """Messages of more than a mebibyte go through another process first."""
  expected = hlo.featurize(_SAMPLE)
  module = proto.HloModuleProto.FromString(_SAMPLE.read_bytes())
  module.name = "x" * (1 << 20)
  (tmp_path / "x.hlo.pb").write_bytes(module.SerializeToString())
  _assert_same_graph(hlo.featurize(tmp_path / "x.hlo.pb"), expected)


def test_a_module_that_does_not_fit_is_refused_in_a_line_and_not_read(monkeypatch):
  size = _SAMPLE.stat().st_size
  for available in (size, 3 * size, 5 * size):
    monkeypatch.setattr(machine, "available", lambda available=available: available)
    with pytest.raises(ValueError, match="are available"):
      hlo.featurize(_SAMPLE)


def test_thousands_of_unknown_types_are_a_short_warning(caplog):
  module = proto.HloModuleProto.FromString(_SAMPLE.read_bytes())
  shape = module.computations[0].instructions[0].shape
  shape.tuple_shapes.extend([type(shape)(element_type=1000 + n) for n in range(5000)])
  hlo.featurize(module.SerializeToString())
  assert "more" in caplog.text and len(caplog.text) < 2000
