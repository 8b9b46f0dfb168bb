"""The command `python -m tpugraphs_jax.view`: files, mistakes, and a missing extra."""

import sys

import jax.numpy as jnp
import pytest

from tests.support import random_graphs
from tpugraphs_jax import hlo
from tpugraphs_jax.data import npz
from tpugraphs_jax.view.__main__ import main


@pytest.fixture
def program(tmp_path):
  path = tmp_path / "program.npz"
  npz.write_layout(path, random_graphs.whole_numbers(0, nodes=30, edges=40))
  return path


def said_by(capsys, *arguments):
  main([*map(str, arguments)])
  return capsys.readouterr()


def refused(capsys, *arguments):
  """The line with which the command refuses."""
  assert main([*map(str, arguments)]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  return line


def test_a_graph_file_is_a_table_of_opcodes(program, capsys):
  said = said_by(capsys, program, "--table").out
  assert "program: 30 nodes, 40 edges, 1 configurable, 2 configurations" in said
  rows = [line.split() for line in said.splitlines()[3:]]
  assert sum(int(row[1]) for row in rows) == 30


def test_an_hlo_module_is_read_as_text_and_as_bytes(tmp_path, capsys):
  graph = hlo.featurize(lambda x: jnp.tanh(x) @ x, jnp.ones((4, 4)))
  path = tmp_path / "step.hlo.pb"
  path.write_bytes(graph.module.SerializeToString())
  assert f"step: {graph.num_nodes} nodes" in said_by(capsys, path, "--table").out
  path = tmp_path / "step.txt"
  path.write_text("HloModule m\n\nENTRY e {\n  ROOT p = f32[4]{0} parameter(0)\n}\n")
  assert "parameter  1" in said_by(capsys, path, "--table").out


def test_without_the_extra_the_table_is_shown_and_a_line_says_what_to_install(
  program, capsys, monkeypatch
):
  monkeypatch.delitem(sys.modules, "tpugraphs_jax.view.explorer", raising=False)
  monkeypatch.delattr("tpugraphs_jax.view.explorer", raising=False)
  monkeypatch.setitem(sys.modules, "model_explorer", None)
  said = said_by(capsys, program, "--config=1", "--against=0")
  assert "layouts, configuration 1" in said.out
  (line,) = said.err.splitlines()
  assert 'pip install ".[view]"' in line


def test_mistakes_end_in_one_line(program, tmp_path, capsys):
  assert "no such file" in refused(capsys, tmp_path / "none.npz")
  assert "configuration 2 of program, expected 0 to 1" in refused(capsys, program, "--config=2")
  assert "missing" in refused(capsys, program, "--config=1", "--model=none")
  for name, content in [
    ("a.npz", b"PK\3\4 and more"),
    ("a.json", b'{"a": 1}'),
    ("a.json", b"{"),
    ("a.png", b"\x89PNG\r\n\x1a\n"),
    ("empty", b""),
  ]:
    path = tmp_path / name
    path.write_bytes(content)
    assert str(path) in refused(capsys, path)
  assert "a folder" in refused(capsys, tmp_path)
