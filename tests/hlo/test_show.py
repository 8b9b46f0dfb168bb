import os
from pathlib import Path
import sys

import hlo_modules
import pytest

from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import __main__ as cli, proto, show

_SAMPLE = Path(__file__).parents[1] / "data" / "hlo" / "text_ops1.hlo.pb"


def _graph():
  callee = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=1), name='say "hi"', id=7)
  main = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=2, shape=[4, 5]),
      hlo_modules.instruction("erf", id=3, operands=[2], shape=[4, 5]),
      hlo_modules.instruction("reshape", id=4, operands=[3], shape=[20], callees=[7]))
  return hlo.featurize(hlo_modules.module(callee, main).SerializeToString())


def test_the_summary_names_sizes_opcodes_computations_and_configurable_nodes():
  lines = show.summary(_graph()).splitlines()
  assert lines[0] == "module: 4 nodes, 3 edges, 2 computations"
  assert "  main  1  3  reshape.4" in lines
  assert "  parameter  63  2" in lines
  assert "  erf  0, not in the table  1" in lines
  assert "  3  reshape  f32[20] <- f32[4,5]  reshape.4" in lines


def test_dot_draws_every_node_and_edge_once_with_calls_dashed():
  text = show.dot(_graph())
  assert text.count("[label=") == 4
  assert text.count(" -> ") == 3
  assert "n0 -> n3 [style=dashed];" in text
  assert "n2 -> n3;" in text
  assert r'label="say \"hi\"";' in text
  assert text.count("{") == text.count("}")


def test_a_shape_is_written_as_in_hlo_text():
  shape = proto.ShapeProto(element_type=13)
  part = shape.tuple_shapes.add(element_type=16, dimensions=[8, 128])
  part.layout.minor_to_major.extend([1, 0])
  shape.tuple_shapes.add(element_type=28, dimensions=[2])
  assert show.shape_text(shape) == "(bf16[8,128]{1,0}, type28[2])"


@pytest.mark.parametrize("option, start", [([], "text_ops1: 58 nodes, 59 edges"),
                                           (["--dot"], 'digraph "text_ops1" {')])
def test_the_command_prints_a_file(capsys, option, start):
  assert cli.main(["show", str(_SAMPLE), *option]) == 0
  assert capsys.readouterr().out.startswith(start)


def test_the_command_reports_a_file_that_cannot_be_read(capsys, tmp_path):
  assert cli.main(["show", str(tmp_path / "none.pb")]) == 1
  assert "none.pb: no such file" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_mistake(capsys, monkeypatch):
  read, write = os.pipe()
  os.close(read)
  with os.fdopen(write, "w") as unread:
    monkeypatch.setattr(sys, "stdout", unread)
    assert cli.main(["show", str(_SAMPLE)]) == 0
  assert not capsys.readouterr().err
