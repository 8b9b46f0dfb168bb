"""Layout rankers by name: scores `[G, C]` of layout configurations of whole programs.

Both models keep node features as `SplitNodes`: what no configuration has
touched yet is computed once per graph, and only the nodes within reach of a
configurable node once per configuration. Larger scores mean slower.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn

from tpugraphs_jax.models import layers
from tpugraphs_jax.models.res_model import ResModel
from tpugraphs_jax.models.sage import SAGE

MODELS = {"ResModel": ResModel, "SAGE": SAGE}


def create(name: str, **options: Any) -> nn.Module:
  """The layout model of that name.

  Raises:
    ValueError: for a name that is not in `MODELS` or an option it does not have.
  """
  return layers.create(MODELS, name, **options)
