"""A trained model where it is kept: in one small file, or in the working folder of its run.

The file `model.npz` holds the parameters as arrays named `params/<module>/.../<parameter>`,
and the array `card`, the bytes of a JSON object: config, feature transforms, versions, where
the model came from, and a checksum of the parameters. NumPy alone can read it. A working
folder holds checkpoints besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from flax import traverse_util
import numpy as np

from tpugraphs_jax import files as files_lib, parallel, registry, remote
from tpugraphs_jax.data import features, npz
from tpugraphs_jax.data.features import Transform
from tpugraphs_jax.rankers.base import SECOND_STAGE
from tpugraphs_jax.train import checkpoint, loop

FILE = "model.npz"
FORMAT = 1  # of the file; a reader refuses later ones
_PARAMS = "params/"


@dataclasses.dataclass(frozen=True, eq=False)
class Artefact:
  """What a model file holds."""

  config: dict[str, Any]  # JSON types: the config that the model was trained with
  transforms: dict[str, Transform]  # as `features.to_saved` names them
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
  with files_lib.replacing(path, "wb") as file:
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
    with npz.NpzArchive(path) as archive:
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


CONFIG_FILE, TRANSFORMS_FILE = "config.json", "features.json"
# What may differ between the run that trained a model and one that uses it.
_FREE_FIELDS = ("eval", "train", "profile_steps", "data_root")
_FREE_DATA_FIELDS = (
    "skip_bad_files", "store_dir", "extra_dir", "loader_threads", "neighbour_slots")


def fingerprint(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields that a checkpoint must agree with to be used."""
  fields = {k: v for k, v in config.items() if k not in _FREE_FIELDS}
  fields["data"] = {k: v for k, v in fields["data"].items() if k not in _FREE_DATA_FIELDS}
  # Where a module was found may change, which modules there are may not.
  fields["extensions"] = sorted(registry.names_of(fields["extensions"]))
  return fields


def config_of(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """The config that the model in `workdir` was trained with; also of a model file alone.

  Raises:
    FileNotFoundError: nothing was trained there.
    ValueError: its config.json is damaged.
  """
  path = remote.fetch(workdir) / CONFIG_FILE
  model = path.with_name(FILE)
  is_trained_here = (path.parent / loop.CHECKPOINTS).is_dir()
  if model.exists() and not path.exists() and not is_trained_here:
    return load(model).config
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: --workdir must name a folder that a model was "
                            "trained in")
  try:
    manifest = files_lib.unsealed(json.loads(path.read_text()))
    return with_tuples(manifest["config"])
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}); train again") from None


def digests(files: Iterable[Path], workdir: Path) -> dict[str, str]:
  """SHA-256 of files by path within a working folder, in process 0 alone, which has them."""
  if not parallel.is_primary():
    return {}
  return {path.relative_to(workdir).as_posix(): files_lib.digest_of(path) for path in files}


def best_checkpoint(workdir: Path, config: Mapping[str, Any]) -> checkpoint.SavedParams | None:
  """The parameters of the best checkpoint of the last phase of training, else of the newest.

  Raises:
    ValueError: the checkpoints are of another config.
  """
  is_tuned = config["task"] == "segments" and config["segments"]["finetune"]["epochs"]
  folder = workdir / (SECOND_STAGE if is_tuned else "") / loop.CHECKPOINTS
  checkpoints = checkpoint.Checkpoints(
      folder, config=fingerprint(config), read_only=True)
  try:
    return checkpoints.best_params()
  finally:
    checkpoints.close()


def read(place: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Artefact:
  """The model of a working folder, or of a model file.

  A folder's checkpoints come before its model file: a run that was cut short may have
  written the one and not yet the other. All processes get what process 0 finds.

  Args:
    place: a folder that a model was trained in, a folder that holds `model.npz` alone,
      or a model file.
    config: expected of the model; that which it was trained with unless given.

  Raises:
    FileNotFoundError: nothing was trained there.
    ValueError: what is there is damaged, of a newer version or of another config.
  """
  path = remote.fetch(place)
  has_checkpoints = parallel.from_primary(
      path.is_dir() and (path / loop.CHECKPOINTS).is_dir())
  if has_checkpoints:
    return _from_checkpoints(path, config)
  found = error = None
  if parallel.is_primary():
    try:
      found = load(path / FILE if path.is_dir() or not path.suffix else path)
    except (ValueError, OSError) as caught:
      error = caught
  found, error = parallel.from_primary((found, error))
  if error is not None:
    raise error
  return found


def _from_checkpoints(workdir: Path, config: Mapping[str, Any] | None) -> Artefact:
  chosen = config
  if chosen is None:
    chosen = parallel.from_primary(config_of(workdir) if parallel.is_primary() else None)
  found = best_checkpoint(workdir, chosen)
  if found is None:
    raise FileNotFoundError(f"{workdir} holds no checkpoint: train first")
  transforms = None
  if parallel.is_primary():
    transforms = features.load(workdir / TRANSFORMS_FILE)
    there = [workdir / name for name in found.files if (workdir / name).exists()]
    checkpoint.check_files(workdir / loop.CHECKPOINTS, found.files, digests(there, workdir))
  about = {"step": found.step, "value": found.value}
  return Artefact(dict(chosen), parallel.from_primary(transforms), found.params, about)
