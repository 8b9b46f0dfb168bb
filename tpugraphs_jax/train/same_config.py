"""Refuses a checkpoint that was saved with another config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Fields that configs of version 0.1 did not have: where a checkpoint lacks one of them,
# it stands for what there was no choice of then.
_ADDED_FIELDS = ("extensions", "data.features", "data.source", "data.search")
# Fields that came later, at the values they stood for.
DEFAULTS = {
    "data.virtual_node": "none", "data.cluster_nodes": 1000, "batch.graph_sampling": "uniform",
    "loss.pair_reduction": "own", "loss.margin": 0.0, "loss.score_norm_clip": 0.0,
    "loss.noise": 0.0, "optimizer.average_window": (), "eval.permutations": 1,
}
LAYOUT_DEFAULTS = {"data.entropy_threshold": 0.0}
SEGMENT_DEFAULTS = {"segments.finetune.optimizer.average_window": ()}
_KNOWN = DEFAULTS | LAYOUT_DEFAULTS | SEGMENT_DEFAULTS


def check(where: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Raises ValueError with the fields that differ between two configs, and their values.

  Args:
    where: the checkpoint, for the message.
    saved: nested fields (JSON types) that it was saved with.
    current: nested fields that it should have.
  """
  old, new = dict(_fields(saved)), dict(_fields(current))
  before = {name: list(value) if isinstance(value, tuple) else value
            for name, value in _KNOWN.items() if name in new}
  old = before | old
  absent = "absent"
  differences = [
      f"{name} is {old.get(name, absent)} there and {new.get(name, absent)} here"
      for name in sorted(old.keys() | new.keys())
      if old.get(name, absent) != new.get(name, absent)
      and (name in old or name not in _ADDED_FIELDS)
  ]
  if differences:
    raise ValueError(
        f"{where} is a checkpoint of another config: {'; '.join(differences)}. Give the"
        " same values, or another --workdir"
    )


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """The leaves of a nested dict with their dotted names."""
  for name, value in config.items():
    if isinstance(value, dict) and value:
      yield from _fields(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value
