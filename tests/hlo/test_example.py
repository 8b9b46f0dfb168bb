import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tpugraphs_jax.data import synthetic
from tpugraphs_jax.run import training

_ROOT = Path(__file__).parents[2]


def _load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _example():
  return _load(_ROOT / "examples" / "rank_your_program.py")


def _config(variant):
  return _load(_ROOT / "configs" / "layout.py").get_config(variant)


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


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A layout model, trained for one step on a synthetic graph."""
  root = tmp_path_factory.mktemp("example")
  data_root = synthetic.generate(
      root / "synthetic", collections=["layout:xla:random"], limit=1, progress=False)
  config = _config("xla-random,full,ci")
  config.data_root = str(data_root)
  config.batch.update(graphs=4, configs=4, slates_per_epoch=4)
  config.model.update(num_gnns=1, op_embed_dim=2, hidden_dim=4)
  config.train.update(epochs=1, valid_configs=4)
  training.run(config, root / "model", mode="train")
  return root / "model"


def test_the_document_goes_from_functions_to_rankings(workdir, capsys):
  _example().main([f"--model={workdir}", "--configs=50"])
  printed = capsys.readouterr().out
  for name in ("resnet_block", "transformer_layer"):
    assert f"{name}: " in printed
  assert printed.count("50 configurations") == 2
  assert printed.count("predicted fastest: configuration ") == 2
  assert printed.count("predicted slowest: configuration ") == 2
