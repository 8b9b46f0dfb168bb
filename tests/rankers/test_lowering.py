"""Functions on devices lower for GPUs and TPUs, on a machine that has neither.

`tools/compilers.py` compiles the plain steps of tiles, whole programs and tables for both, and
`tests/run/test_presets.py` lowers the training steps of presets.
"""

import functools

import jax
from jax import export
import numpy as np
import pytest

from tests.support import parts
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.train import training

PLATFORMS = "cuda", "tpu"  # other tests compile for CPUs
BFLOAT16 = {"model.dtype": "bfloat16", "model.precision": "default"}
CASES = {
  "tile, bfloat16": ("tile", "recommended,ci", BFLOAT16),
  "SAGE, bfloat16": ("layout", "full,ci", BFLOAT16),
  "segments, the others recomputed": ("layout", "gst,ci", {}),
  "segments with a table in bfloat16, then the head": (
    "layout",
    "gst_efd,ci",
    BFLOAT16 | {"segments.history_dtype": "bfloat16", "segments.finetune.epochs": 1},
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_mapped_functions_of_a_run_lower_for_every_platform(
  case, data_root, tmp_path, monkeypatch
):
  """Training, scoring, and reading and writing of a table: everything on devices is mapped.

  Nothing is compiled: a mapped function returns zeros of the shapes that it would return.
  """
  lowered = []

  def pmap(function, *, in_axes=0, **options):
    vectorised = jax.jit(
      jax.vmap(
        function, in_axes=in_axes, axis_name=parallel.DEVICES, axis_size=jax.local_device_count()
      )
    )
    outputs = {}

    @functools.wraps(function)
    def call(*arguments):
      shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), arguments)
      if str(shapes) not in outputs:
        if not outputs:
          lowered.append(export.export(vectorised, platforms=PLATFORMS)(*shapes).platforms)
        outputs[str(shapes)] = jax.eval_shape(vectorised, *shapes)
      return parallel.replicate(
        jax.tree.map(lambda output: np.zeros(output.shape[1:], output.dtype), outputs[str(shapes)])
      )

    return call

  monkeypatch.setattr(parallel, "pmap", pmap)
  kind, variant, changes = CASES[case]
  fields = parts.TINY | {"train.valid_configs": 8, "batch.slates_per_epoch": 4} | changes
  config = parts.config_of(kind, variant, data_root=str(data_root), **fields)
  training.run(config, tmp_path / "run", do=["train"])
  assert len(lowered) >= 2 and set(lowered) == {PLATFORMS}
