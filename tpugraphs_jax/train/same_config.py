"""Refuses a checkpoint that was saved with another config, or beside other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Fields that configs of version 0.1 did not have: where a checkpoint lacks one of them,
# it stands for what there was no choice of then.
_ADDED_FIELDS = ("extensions", "data.features", "data.source", "data.search")
# Fields that came later, at the values they stood for, by the configs that have them.
_DEFAULTS = {
    "data.virtual_node": "none", "data.cluster_nodes": 1000, "batch.graph_sampling": "uniform",
    "loss.pair_reduction": "own", "loss.margin": 0.0, "loss.score_norm_clip": 0.0,
    "loss.noise": 0.0, "optimizer.average_window": (), "eval.permutations": 1,
}
_TILE_DEFAULTS = {"data.config_features": ("released",)}
_LAYOUT_DEFAULTS = {"data.entropy_threshold": 0.0, "data.also": ()}
_SEGMENT_DEFAULTS = {"segments.finetune.optimizer.average_window": ()}
_MODEL_DEFAULTS = {
    "ScoreTables": {"model.residual": "none", "model.by_bytes": True},
    "Composed": {"model.merge_unary": False, "model.readout_layers": "last",
                 "model.both_kinds": False}}
_ALL_DEFAULTS = _DEFAULTS | _TILE_DEFAULTS | _LAYOUT_DEFAULTS | _SEGMENT_DEFAULTS
for _fields_of_model in _MODEL_DEFAULTS.values():
  _ALL_DEFAULTS |= _fields_of_model


# Fields that change no result: how many configurations pass the model at a time.
_FREE_FIELDS = ("batch.config_chunk",)


def later_fields(config: Mapping[str, Any]) -> dict[str, Any]:
  """Fields by dotted name that a config of this kind has had since version 0.1, and their values."""
  found = _DEFAULTS | (_TILE_DEFAULTS if config["task"] == "tile" else _LAYOUT_DEFAULTS)
  found |= _SEGMENT_DEFAULTS if config["task"] == "segments" else {}
  return found | _MODEL_DEFAULTS.get(config["model"]["name"], {})


def check(where: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Raises ValueError with the fields that differ between two configs, and their values.

  Args:
    where: the checkpoint, for the message.
    saved: nested fields (JSON types) that it was saved with.
    current: nested fields that it should have.
  """
  old, new = dict(_fields(saved)), dict(_fields(current))
  old = {name: list(value) if isinstance(value, tuple) else value
         for name, value in _ALL_DEFAULTS.items() if name in new} | old
  absent = "absent"
  differences = [
      f"{name} is {old.get(name, absent)} there and {new.get(name, absent)} here"
      for name in sorted(old.keys() | new.keys())
      if old.get(name, absent) != new.get(name, absent) and name not in _FREE_FIELDS
      and (name in old or name not in _ADDED_FIELDS)
  ]
  if differences:
    raise ValueError(
        f"{where} is a checkpoint of another config: {'; '.join(differences)}. Give the"
        " same values, or another --workdir"
    )


def check_files(where: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
  """Raises ValueError with the first file that is not the one a checkpoint was saved beside.

  Args:
    where: the checkpoint, for the message.
    saved: digests of the files that it was saved beside, by path within the working folder.
    current: digests of what is there now. Files that one side does not know are not compared.
  """
  for name in sorted(saved.keys() & current.keys()):
    if saved[name] != current[name]:
      raise ValueError(
          f"{name} is of another run: it is not the file that {where} was trained with. Put that "
          "file back, or train again in another --workdir")


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """The leaves of a nested dict with their dotted names."""
  for name, value in config.items():
    if isinstance(value, dict) and value:
      yield from _fields(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value
