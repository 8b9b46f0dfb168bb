from pathlib import Path

from tpugraphs_jax.hlo import __main__ as cli

_SAMPLE = Path(__file__).parents[1] / "data" / "hlo" / "text_ops1.hlo.pb"


def test_the_command_prints_a_file(capsys):
  assert cli.main(["show", str(_SAMPLE)]) == 0
  assert capsys.readouterr().out.startswith("text_ops1: 58 nodes, 59 edges")
