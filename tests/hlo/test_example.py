import importlib.util

import commands


def test_the_example_goes_from_functions_to_rankings(capsys):
  path = commands.ROOT / "examples" / "rank_your_program.py"
  spec = importlib.util.spec_from_file_location(path.stem, path)
  example = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(example)
  example.main(["--model=layout-cpu-measured", "--configs=50"])
  printed = capsys.readouterr().out
  for name in ("resnet_block", "transformer_layer"):
    assert f"{name}: " in printed
  assert printed.count("50 configurations") == 2
  for end in ("fastest", "slowest"):
    assert printed.count(f"predicted {end}: configuration ") == 2
  assert printed.count("output ") >= 4 * 5  # the choices of each configuration
