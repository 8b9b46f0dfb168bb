"""Refuses impossible values of a config by the name of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import operator
from typing import Any

import ml_collections


def one_of(config: ml_collections.ConfigDict, choices: Mapping[str, Sequence[Any]]) -> None:
  """ValueError unless every field (`batch.sampling`) has one of its values."""
  for field, allowed in choices.items():
    value = operator.attrgetter(field)(config)
    if value not in allowed:
      raise ValueError(f"--config.{field} is {value!r}, expected one of "
                       f"{', '.join(map(str, allowed))}")


def at_least(config: ml_collections.ConfigDict, limits: Mapping[str, float]) -> None:
  """ValueError unless every field (`batch.configs`) is a number that is large enough."""
  for field, least in limits.items():
    value = operator.attrgetter(field)(config)
    if not value >= least:  # nor NaN
      raise ValueError(f"--config.{field} is {value}, expected at least {least}")
