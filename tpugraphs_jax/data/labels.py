"""The kind of a collection's labels: measured, synthetic, or an estimate of which compiler."""

from __future__ import annotations

import json
from pathlib import Path

from tpugraphs_jax import remote
from tpugraphs_jax.collections import Collection, RELEASED

_STAMP = "synthetic.json"  # beside the data that `tpugraphs_jax.data.synthetic` writes
SYNTHETIC = "SYNTHETIC: run times of a machine model, no measurement of real programs"
MEASURED = "measured run times of the released data set"
UNKNOWN = "of unknown kind: no .json of `tpugraphs_jax.collect` lies beside the files"


def is_synthetic(data_root: str) -> bool:
  """Whether the data come from this project's generator."""
  if remote.is_remote(data_root):
    return remote.exists(remote.join(data_root.rstrip("/").rpartition("/")[0], _STAMP))
  return (Path(data_root).expanduser().parent / _STAMP).is_file()


def kind_of(data_root: str, collection: Collection) -> str:
  """What the labels of a collection are, in words for banners, pages and axes.

  Args:
    data_root: folder or bucket with `tile/` and `layout/`.
    collection: one of the released ones, or an own one with the files that
      `tpugraphs_jax.collect` writes beside each graph.
  """
  if is_synthetic(data_root):
    return SYNTHETIC
  if collection.name in RELEASED:
    return MEASURED
  if remote.is_remote(data_root):
    return UNKNOWN
  folder = Path(data_root).expanduser().joinpath(*collection.name.split(":"))
  for path in sorted(folder.glob("*/*.json")):
    try:
      return _of_note(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, OSError):
      return UNKNOWN
  return UNKNOWN


def _of_note(note: dict[str, str]) -> str:
  """From the notes beside one graph of an own collection."""
  if note["label"] == "measured":
    return f"measured run times on {note.get('target') or note.get('machine', 'this machine')}"
  version = f", libtpu {note['libtpu']}" if "libtpu" in note else ""
  return f"ESTIMATE of a compiler ({note['label']}, {note['target']}{version}), no measurement"
