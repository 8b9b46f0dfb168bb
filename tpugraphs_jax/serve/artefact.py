"""A trained model in one small file, `model.npz`.

The file holds the parameters as arrays named `params/<module>/.../<parameter>`, and the
array `card`, the bytes of a JSON object: config, feature transforms, versions, where the
model came from, and a checksum of the parameters. NumPy alone can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from flax import traverse_util
import numpy as np

from tpugraphs_jax import files
from tpugraphs_jax.data import npz_archive
from tpugraphs_jax.data.features import Transform

FILE = "model.npz"
FORMAT = 1  # of the file; a reader refuses later ones
_PARAMS = "params/"


@dataclasses.dataclass(frozen=True, eq=False)
class Artefact:
  """What a model file holds."""

  config: dict[str, Any]  # JSON types: the config that the model was trained with
  transforms: dict[str, Transform]  # as `feature_blocks.to_saved` names them
  params: dict[str, Any]  # nested, float32 arrays
  about: dict[str, Any]  # JSON types: step, validation metrics, versions, ...


def save(path: Path, artefact: Artefact) -> None:
  """Writes a model file; one that is there is replaced when the new one is complete."""
  arrays = {
      _PARAMS + name: np.asarray(value)
      for name, value in traverse_util.flatten_dict(artefact.params, sep="/").items()}
  card = {
      "format": FORMAT,
      "config": artefact.config,
      "transforms": {name: t.to_dict() for name, t in artefact.transforms.items()},
      "about": artefact.about,
      "checksum": _checksum(arrays),
  }
  text = np.frombuffer(json.dumps(card).encode(), np.uint8)
  with files.replacing(path, "wb") as file:
    np.savez_compressed(file, card=text, **arrays)


def load(path: Path) -> Artefact:
  """Reads a model file.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged, or of a newer version.
  """
  if not path.is_file():
    raise FileNotFoundError(f"{path} is missing: name a folder that a model was trained in, or a "
                            "model file")
  try:
    with npz_archive.NpzArchive(path) as archive:
      arrays = {name: archive.read(name) for name in archive.names}
    card = json.loads(arrays.pop("card").tobytes())
    found = card["format"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}): copy it again, or train again") from None
  if not isinstance(found, int) or found > FORMAT:
    raise ValueError(f"{path} is of format {found}, and this version of tpugraphs_jax reads up to "
                     f"{FORMAT}: pip install --upgrade tpugraphs-jax")
  return _checked(path, card, arrays)


def _checked(path: Path, card: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Artefact:
  try:
    if card["checksum"] != _checksum(arrays):
      raise ValueError("the checksum of its parameters does not fit")
    flat = {name.removeprefix(_PARAMS): array for name, array in arrays.items()}
    return Artefact(
        config=with_tuples(card["config"]),
        transforms={name: Transform.from_dict(t) for name, t in card["transforms"].items()},
        params=traverse_util.unflatten_dict(flat, sep="/"), about=card["about"])
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} is damaged ({error}): copy it again, or train again") from None


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name])
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def with_tuples(value: Any) -> Any:
  """Undoes what JSON does to tuples: models and overrides want them."""
  if isinstance(value, Mapping):
    return {key: with_tuples(part) for key, part in value.items()}
  return tuple(map(with_tuples, value)) if isinstance(value, (list, tuple)) else value
