"""Every product of a step has the precision that the config asks for.

Processors compute in float32 whatever the precision: only the lowered step shows it.
Steps of presets are those of training, which hold all products of scoring.
"""

from __future__ import annotations

import jax
import parts
import pytest
import steps

from tpugraphs_jax.configs import base

PRESETS = [(kind, name) for kind in ("layout", "tile") for name in base.presets(kind)]
OTHERS = [
  ("tile", ""),
  ("tile", "recommended"),
  ("tile", "LateJoinResGCN"),
  ("tile", "MLP"),
  ("layout", "full"),
  ("layout", "official"),
  ("layout", "gst"),
  ("layout", "gst_ed"),
  ("layout", "tables"),
  ("layout", "own,recommended"),
]


@pytest.mark.parametrize(
  "kind, variant, step",
  [
    *((*each, step) for each in OTHERS for step in steps.STEPS),
    *((*each, "train") for each in PRESETS),
  ],
)
def test_every_product_of_a_step_has_the_precision_of_the_config(kind, variant, step):
  config = parts.config_of(kind, f"{variant},ci".strip(","))
  found = steps.products(steps.lower(config, step, jax.local_devices()[:1], nodes=60))
  assert config.model.precision == "highest" and set(found) == {"highest"}, found
