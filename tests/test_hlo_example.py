import importlib.util
from pathlib import Path

import numpy as np
import pytest

_PATH = Path(__file__).parents[1] / "examples" / "rank_your_program.py"


def _example():
  spec = importlib.util.spec_from_file_location("rank_your_program", _PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("name, opcode", [
    ("resnet_block", "convolution"), ("transformer_layer", "dot")])
def test_a_program_becomes_a_graph_with_layouts_for_its_heavy_instructions(name, opcode):
  example = _example()
  graph = example.candidates(name, 64)
  heavy = [instruction.opcode for computation in graph.module.computations
           for instruction in computation.instructions].count(opcode)
  assert heavy >= 8
  assert len(graph.config_node) > heavy
  assert len(graph.configs) == 64
  assert graph.configs.decode(np.arange(64)).shape == (64, len(graph.config_node), 18)
  lines = example.describe(graph, 63, nodes=3).splitlines()
  assert len(lines) == 3 and all("output" in line for line in lines)
