"""From a config to the flax modules of a ranker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.segments.model import SegmentModel


def create_model(
    config: Mapping[str, Any], unscaled: Sequence[str] = ()
) -> tuple[base.Ranker, Any]:
  """The ranker that a config names, and the module that is trained.

  They are the same, but for segments: there a `SegmentModel` around the ranker is trained.
  `unscaled` are the blocks of node features that reach the model as they are.

  Raises:
    ValueError: see `base.create` and `base.check_use`.
  """
  kind = "tile" if config["task"] == "tile" else "layout"
  options = dict(config["model"])
  ranker = base.create(kind, options.pop("name"), **options)
  segments = segments_of(config)
  use = base.Use(
      slate=config["batch"]["configs"], scored=config["eval"]["configs"],
      chunk=config["batch"]["config_chunk"],
      config_transform=config["data"]["config_transform"],
      features=tuple(config["data"]["features"]), unscaled=tuple(unscaled),
      segments=segments is not None,
      history=segments is not None and uses_history(segments))
  base.check_use(ranker.sees, use)
  if segments is None:
    return ranker, ranker
  names = ("readout", "aggregation", "keep", "history_init", "keep_unit")
  return ranker, SegmentModel(ranker, **{name: segments[name] for name in names})


def segments_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """The options of training on segments; None for whole graphs."""
  return config["segments"] if config["task"] == "segments" else None


def uses_history(segments: Mapping[str, Any]) -> bool:
  """Whether training on segments needs a table: not if others are recomputed or never count."""
  return segments["keep"] > 0 and not segments["recompute"]
