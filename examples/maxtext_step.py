"""What MaxText's own training step takes on a slice, without a TPU.

    pip install "maxtext[tpu]" ".[tpu]"  # Python 3.12
    python examples/maxtext_step.py CONFIGS/base.yml model_name=llama3.1-8b compile_topology=v6e-8

`train_compile` makes the step, its arguments and its mesh from MaxText's configuration files, and
hands them to `jit_and_compile`, whose place `estimate` takes.
"""

import sys

import jax
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import max_utils

import tpugraphs_jax


def estimate(step, args, kwargs, mesh, given, returned, static, donated, config, rules):
  """Prints the estimate of a step; arguments as of MaxText's `jit_and_compile`."""
  options = max_utils.parse_libtpu_flags_to_dict(config.compile_xla_flags)
  with jax.set_mesh(mesh), rules:
    jitted = jax.jit(
      step,
      in_shardings=given,
      out_shardings=returned,
      static_argnums=static,
      donate_argnums=donated,
      compiler_options=options,
    )
    print(tpugraphs_jax.estimate(jitted, *args, targets=[config.compile_topology], **kwargs))
  sys.exit()  # MaxText would go on with the compiled step


if __name__ == "__main__":
  train_compile.jit_and_compile = estimate
  train_compile.main(sys.argv)
