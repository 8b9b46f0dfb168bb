"""Every product of a step has the precision that the config asks for.

Processors compute in float32 whatever the precision: only the lowered step shows it.
`tests/run/test_presets.py` has the steps of the other presets, `tools/compilers.py` those of
`EarlyJoinSAGE`, `SAGE`, `ResModel`, `gst_ed` and tables.
"""

from __future__ import annotations

import jax
import pytest

from benchmarks import ranker_steps
from tests.support import parts

VARIANTS = [
  ("tile", "LateJoinResGCN"),
  ("tile", "MLP"),
  ("layout", "gst"),
  ("layout", "own,recommended"),
  ("layout", "preset=gst"),
  ("layout", "preset=seventh"),
]


@pytest.mark.parametrize("step", ranker_steps.STEPS)
@pytest.mark.parametrize("kind, variant", VARIANTS)
def test_every_product_of_a_step_has_the_precision_of_the_config(kind, variant, step):
  config = parts.config_of(kind, f"{variant},ci".strip(","))
  found = ranker_steps.products(ranker_steps.lower(config, step, jax.local_devices()[:1], nodes=60))
  assert config.model.precision == "highest" and set(found) == {"highest"}, found
