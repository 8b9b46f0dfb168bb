"""Jobs of the project's configs with some fields changed."""

from __future__ import annotations

from typing import Any

import ml_collections

from tpugraphs_jax.run import configs
from tpugraphs_jax.run.job import Job

# The smallest rankers of whole graphs.
VARIANTS = {"tile": "ci", "layout": "full,ci"}


def config_of(kind: str, variant: str = "", **changes: Any) -> ml_collections.ConfigDict:
  """A config with some fields changed (`**{"batch.graphs": 4}`)."""
  config = configs.load(f"{kind}.py:{variant or VARIANTS[kind]}")
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return config


def make(kind: str, variant: str = "", **changes: Any) -> Job:
  """The job of a config with some fields changed."""
  return Job.of(config_of(kind, variant, **changes))
