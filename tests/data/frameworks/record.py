"""Writes the HLO of a small training step, as a framework gives it: FRAMEWORK.hlo.pb.

    python record.py tensorflow    in an environment with tensorflow
    python record.py torch_xla     in an environment with torch and torch_xla
    python record.py dump          in an environment with jax; XLA writes the module

The step is the gradient of a cross entropy: a convolution, a rectifier and a dense layer, for 4
images of 8 x 8 x 3. The files beside this script are of TensorFlow 2.21.0, PyTorch 2.9.1 with
PyTorch/XLA 2.9.0, and jax 0.10.2, all on a CPU.
"""

import os
from pathlib import Path
import sys
import tempfile


def tensorflow() -> bytes:
  import tensorflow as tf

  kernel, dense = tf.zeros((3, 3, 3, 16)), tf.zeros((8 * 8 * 16, 10))

  @tf.function(jit_compile=True)
  def step(kernel, dense, images, labels):
    with tf.GradientTape() as tape:
      tape.watch((kernel, dense))
      x = tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME"))
      logits = tf.reshape(x, (4, -1)) @ dense
      loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tape.gradient(loss, (kernel, dense))

  images, labels = tf.zeros((4, 8, 8, 3)), tf.zeros((4,), tf.int32)
  return step.experimental_get_compiler_ir(kernel, dense, images, labels)(stage="hlo_serialized")


def torch_xla() -> bytes:
  os.environ["PJRT_DEVICE"] = "CPU"
  import torch
  import torch_xla

  device = torch_xla.device()
  model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(8 * 8 * 16, 10),
  ).to(device)
  images = torch.zeros(4, 3, 8, 8, device=device)
  labels = torch.zeros(4, dtype=torch.int64, device=device)
  torch.nn.functional.cross_entropy(model(images), labels).backward()
  gradients = [parameter.grad for parameter in model.parameters()]
  return torch_xla._XLAC._get_xla_tensors_hlo_proto(gradients)  # pylint: disable=protected-access


def dump() -> bytes:
  folder = tempfile.mkdtemp()
  os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_proto"
  import jax
  import jax.numpy as jnp

  def loss(kernel, dense, images, labels):
    x = jax.nn.relu(
      jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
      )
    )
    logits = jax.nn.log_softmax(x.reshape(4, -1) @ dense)
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

  jax.jit(jax.grad(loss, argnums=(0, 1)))(
    jnp.zeros((3, 3, 3, 16)),
    jnp.zeros((8 * 8 * 16, 10)),
    jnp.zeros((4, 8, 8, 3)),
    jnp.zeros(4, jnp.int32),
  )
  (path,) = Path(folder).glob("*jit_loss.before_optimizations.hlo.pb")
  return path.read_bytes()


if __name__ == "__main__":
  name = sys.argv[1]
  Path(f"{name}.hlo.pb").write_bytes(globals()[name]())
