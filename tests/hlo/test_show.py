from pathlib import Path

import hlo_modules
import pytest

from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import __main__ as cli, show

_SAMPLE = Path(__file__).parents[1] / "data" / "hlo" / "text_ops1.hlo.pb"


def _graph():
  callee = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=1), name='say "hi"', id=7)
  main = hlo_modules.computation(
      hlo_modules.instruction("parameter", id=2, shape=[4, 5]),
      hlo_modules.instruction("erf", id=3, operands=[2], shape=[4, 5]),
      hlo_modules.instruction("reshape", id=4, operands=[3], shape=[20], callees=[7]))
  return hlo.featurize(hlo_modules.module(callee, main).SerializeToString())


def test_dot_draws_every_node_and_edge_once_with_calls_dashed():
  text = show.dot(_graph())
  assert text.count("[label=") == 4
  assert text.count(" -> ") == 3
  assert "n0 -> n3 [style=dashed];" in text
  assert "n2 -> n3;" in text
  assert r'label="say \"hi\"";' in text
  assert text.count("{") == text.count("}")


@pytest.mark.parametrize("option, start", [([], "text_ops1: 58 nodes, 59 edges"),
                                           (["--dot"], 'digraph "text_ops1" {')])
def test_the_command_prints_a_file(capsys, option, start):
  assert cli.main(["show", str(_SAMPLE), *option]) == 0
  assert capsys.readouterr().out.startswith(start)
