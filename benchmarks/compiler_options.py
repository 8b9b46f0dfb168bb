"""Searches compiler options together with layouts, for gradients in bfloat16 on TPU v6e.

    python benchmarks/compiler_options.py

Needs libtpu and no TPU. The labels are **estimates** of the TPU compiler, cycles of all kernels,
and no measurements. The options are the three that the instructions of MaxDiffusion
(github.com/AI-Hypercomputer/maxdiffusion) set for TPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pages
import run_all
import timing

from tpugraphs_jax.tuning import tune
from tpugraphs_jax.tuning.draw import Numbers
from tpugraphs_jax.tuning.problem import Problem

TARGET = "v6e"
OPTIONS = {
  "xla_tpu_scoped_vmem_limit_kib": [8192, 65536],
  "xla_tpu_dot_dot_fusion_duplicated": [True],
  "xla_tpu_rwb_fusion": [False],
}


def _mlp(params, x):
  return jnp.mean((jax.nn.relu(x @ params[0]) @ params[1]).astype(jnp.float32) ** 2)


def _attention(params, x):
  query, key, value = (jnp.einsum("bte,ehd->bthd", x, weight) for weight in params[:3])
  scores = jnp.einsum("bthd,bshd->bhts", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
  mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), value)
  return jnp.mean((x + jnp.einsum("bthd,hde->bte", mixed, params[3])).astype(jnp.float32) ** 2)


def _arrays(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


PROGRAMS = {
  "MLP": (_mlp, _arrays((1024, 4096), (4096, 1024)), *_arrays((1024, 1024))),
  "attention": (_attention, _arrays(*[(256, 4, 64)] * 3, (4, 64, 256)), *_arrays((4, 512, 256))),
}


def search(program: str, budget: int) -> dict[str, Any]:
  """The best choice of a program and all that were labelled, with their ratios."""
  loss, *args = PROGRAMS[program]
  tuned = tune.tune(jax.grad(loss), *args, target=TARGET, budget=budget, options=OPTIONS)
  default = tuned.tried[tuned.problem.default]
  return {
    **tuned.label.versions(),
    "own": default,
    "ratio": tuned.ratio,
    **apart(tuned.problem, tuned.numbers, default),
    "groups": sum(map(bool, tuned.problem.layouts_of(tuned.numbers))),
    "options": tuned.compiler_options,
    "failed": tuned.failed,
    "choices": tuned.candidates,
    "tried": {
      tuned.problem.describe(numbers): value / default for numbers, value in tuned.tried.items()
    },
  }


def apart(problem: Problem, numbers: Numbers, default: int) -> dict[str, float]:
  """The ratios of the layouts of a choice and of its compiler options, each without the other."""
  count = len(problem.layouts_of(numbers))
  parts = {
    "layouts alone": numbers[:count] + problem.default[count:],
    "options alone": problem.default[:count] + numbers[count:],
  }
  raw = dict(problem.raw_labels(list(parts.values())))
  return {name: problem.label.value(raw[part]) / default for name, part in parts.items()}


def table(results: Mapping[str, Any]) -> str:
  """What the search found for each program, Markdown."""
  return pages.table(
    [
      "gradient of",
      "labels",
      "own M cycles",
      "best",
      "its layouts alone",
      "its options alone",
      "options of the best",
      "groups changed",
    ],
    [
      [
        program,
        str(len(row["tried"])),
        f"{row['own'] / 1e6:.3f}",
        *(f"{row[ratio]:.3f}" for ratio in ("ratio", "layouts alone", "options alone")),
        ", ".join(f"`{name}={value}`" for name, value in row["options"].items()) or "defaults",
        str(row["groups"]),
      ]
      for program, row in results["programs"].items()
    ],
  )


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--budget", type=int, default=12, help="labels of a program")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  results = {"programs": {program: search(program, args.budget) for program in PROGRAMS}}
  print(table(results))
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("compiler_options", results)


if __name__ == "__main__":
  main()
