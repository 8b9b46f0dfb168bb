"""Ranks compiler configurations of JAX functions.

  python examples/rank_your_program.py --model=layout-cpu-measured
  python run_layout.py --config=configs/layout.py:xla-random,ci --synthetic --workdir=out/model
  python examples/rank_your_program.py --model=out/model

The programs are the training steps of a ResNet block and of a transformer layer. Each
function is traced and lowered, but never run. Its HLO becomes a graph, layout
configurations are drawn for its convolutions, dots and reshapes, and the model orders
them from fastest to slowest. To rank a program of your own, put its function and the
shapes of its arguments into `PROGRAMS`.

A model orders configurations by the labels that it was trained on. Those of the first
model above are run times measured on a CPU, those of the second are synthetic.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import tpugraphs_jax
from tpugraphs_jax import hlo
from tpugraphs_jax.hlo import proto

# The programs: loss functions and the shapes of their arguments. A training step
# compiles the value and the gradient of a loss.


def normalize(x, axes, *, epsilon=1e-5):
  mean = jnp.mean(x, axes, keepdims=True)
  variance = jnp.mean((x - mean) ** 2, axes, keepdims=True)
  return (x - mean) * jax.lax.rsqrt(variance + epsilon)


def resnet_block_loss(params, images):
  """A bottleneck block on `[batch, height, width, channels]` images."""
  x = images
  for number, kernel in enumerate(params["kernels"]):
    x = jax.lax.conv_general_dilated(
      x, kernel, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = normalize(x, (0, 1, 2))
    if number < len(params["kernels"]) - 1:
      x = jax.nn.relu(x)
  x = jax.nn.relu(x + images)
  logits = jnp.mean(x, (1, 2)) @ params["head"]
  return jnp.mean(logits**2)


def transformer_layer_loss(params, tokens, *, heads=8):
  """Attention and a feed-forward layer on `[batch, length, width]` tokens."""
  batch, length, width = tokens.shape
  x = normalize(tokens, -1)
  query, key, value = (
    (x @ params[name]).reshape(batch, length, heads, width // heads)
    for name in ("query", "key", "value")
  )
  weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(width // heads))
  mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)
  x = tokens + mixed @ params["out"]
  hidden = jax.nn.gelu(normalize(x, -1) @ params["up"])
  return jnp.mean((x + hidden @ params["down"]) ** 2)


def array(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {
  "resnet_block": (
    resnet_block_loss,
    (
      {
        "kernels": [array(1, 1, 256, 64), array(3, 3, 64, 64), array(1, 1, 64, 256)],
        "head": array(256, 1000),
      },
      array(32, 56, 56, 256),
    ),
  ),
  "transformer_layer": (
    transformer_layer_loss,
    (
      {
        "query": array(512, 512),
        "key": array(512, 512),
        "value": array(512, 512),
        "out": array(512, 512),
        "up": array(512, 2048),
        "down": array(2048, 512),
      },
      array(16, 128, 512),
    ),
  ),
}


def candidates(name: str, configs: int, seed: int = 0) -> hlo.HloGraph:
  """The graph of a program's training step, with layout configurations to rank."""
  loss, shapes = PROGRAMS[name]
  return hlo.featurize(jax.value_and_grad(loss), *shapes).with_layouts(configs, seed)


def describe(graph: hlo.HloGraph, config: int, *, nodes: int = 5) -> str:
  """The layouts that a configuration chooses for the first configurable nodes, as text."""
  instructions = [
    instruction
    for computation in graph.module.computations
    for instruction in computation.instructions
  ]
  rows = graph.configs.decode(np.array([config]))[0].astype(int)
  lines = []
  for node, row in list(zip(graph.config_node, rows))[:nodes]:
    tensors = (row[0:6], row[6:12], row[12:18])
    output, first, second = (
      ",".join(str(dim) for dim in tensor if dim >= 0) or "default" for tensor in tensors
    )
    instruction = instructions[node]
    lines.append(
      f"    {instruction.opcode:12} {proto.shape_text(instruction.shape):36} "
      f"output {output}; input {first}; kernel {second}"
    )
  return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--model",
    "--workdir",
    default="layout-cpu-measured",
    help="name of a layout model that ships, or working folder of a run",
  )
  parser.add_argument("--configs", type=int, default=1000, help="number of configurations")
  args = parser.parse_args(argv)
  try:
    model = tpugraphs_jax.load(args.model)
  except (FileNotFoundError, ValueError) as error:
    parser.error(str(error))
  for name in PROGRAMS:
    graph = candidates(name, args.configs)
    order, _ = model.rank(graph)  # fastest first
    default = int(np.flatnonzero(order == 0)[0])  # configuration 0 chooses nothing
    print(
      f"{name}: {graph.num_nodes} nodes, {len(graph.config_node)} configurable, "
      f"{len(order)} configurations; the compiler's own is number {default + 1}"
    )
    for label, config in (("fastest", order[0]), ("slowest", order[-1])):
      note = "" if config else ", the compiler's own choice"
      print(f"  predicted {label}: configuration {config}{note}")
      print(describe(graph, config))


if __name__ == "__main__":
  main()
