"""Reads and writes trained models: working folders, model files, and models in the package.

A model file `model.npz` has the parameters as arrays `params/<module>/.../<parameter>`, and the
array `card`: the bytes of a JSON object with config, feature transforms, versions, origin, and a
checksum of the parameters. NumPy can read the file. A run writes it to its working folder after
every evaluation that is the best so far.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from flax import traverse_util
import jax
import numpy as np

from tpugraphs_jax.data import npz, transforms
from tpugraphs_jax.data.transforms import Transform
from tpugraphs_jax.infra import files, parallel, trust

MODEL_FILE, CONFIG_FILE, TRANSFORMS_FILE = "model.npz", "config.json", "features.json"
FORMAT = 1  # of model files; later formats are refused
MOST_BYTES = 2**30  # of the arrays of a model file: 268 million parameters
SHIPPED = Path(__file__).parent / "shipped_models"

# The fingerprint leaves out these fields: they may differ in a resumed run, and in a run that uses
# the model.
_FREE_FIELDS = ("eval", "train", "profile_steps", "data_root")
_FREE_DATA_FIELDS = ("skip_bad_files", "store_dir", "loader_threads", "neighbour_slots")
# These fields may differ in a resumed run, because they do not affect results.
_SAME_RESULTS = ("batch.config_chunk",)
_PARAMS = "params/"
AGAIN = "copy it again, or train again"
_CARD = {
  "format": int,
  "checksum": str,
  "transforms": {},
  "about": {
    "labels": {"target": (str, type(None)), "config_runtime": str},
    "errors": {"program": trust.NUMBER},
    "training_graphs": [str],
  },
}


@dataclasses.dataclass(frozen=True, eq=False)
class Artefact:
  """The content of a model file."""

  config: dict[str, Any]  # JSON types: the config that the model was trained with
  transforms: dict[str, Transform]  # as `transforms.to_saved` names them
  params: dict[str, Any]  # nested, float32 arrays
  about: dict[str, Any]  # JSON types: step, validation metrics, versions, ...


def write(path: Path, artefact: Artefact) -> None:
  """Writes a model file; an existing file is replaced atomically."""
  flat = traverse_util.flatten_dict(artefact.params, sep="/")
  arrays: dict[str, Any] = {_PARAMS + name: np.asarray(value) for name, value in flat.items()}
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


def read_file(path: Path) -> Artefact:
  """Reads a model file.

  Raises:
    FileNotFoundError: it is missing.
    ValueError: it is damaged, or of a newer version.
  """
  if not path.is_file():
    raise FileNotFoundError(
      f"{path} is missing: name a folder that a model was trained in, or a model file"
    )
  with trust.reading(path, AGAIN):
    with npz.NpzArchive(path, most_bytes=MOST_BYTES) as archive:
      arrays = {name: archive.read(name) for name in archive.names}
    card = trust.parse(arrays.pop("card").tobytes())
    trust.check(card, _CARD, "card")
    if (version := card["format"]) <= FORMAT:
      return _artefact(card, arrays)
  raise ValueError(
    f"{path} is of format {version}, and this version of tpugraphs_jax reads up to "
    f"{FORMAT}: install a newer one"
  )


def _artefact(card: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Artefact:
  if card["checksum"] != _checksum(arrays):
    raise ValueError("the checksum of its parameters does not fit")
  for name, array in arrays.items():
    if not name.startswith(_PARAMS) or array.dtype != np.float32:
      raise ValueError(f"{name} is {array.dtype}, expected parameters, float32")
  flat = {name.removeprefix(_PARAMS): array for name, array in arrays.items()}
  return Artefact(
    config=trust.config(card["config"]),
    transforms={name: Transform.from_dict(t) for name, t in card["transforms"].items()},
    params=traverse_util.unflatten_dict(flat, sep="/"),
    about=card["about"],
  )


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name])
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def fingerprint(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a config on which a checkpoint depends."""
  fields = {k: v for k, v in config.items() if k not in _FREE_FIELDS}
  fields["data"] = {k: v for k, v in fields["data"].items() if k not in _FREE_DATA_FIELDS}
  fields["extensions"] = sorted(fields["extensions"])
  return fields


def first_difference(tree: Any, expected: Any) -> tuple[str, str, str] | None:
  """The first array whose shape or dtype differs between two pytrees; None where all agree.

  Returns:
    Its name, and its description in each tree, such as `float32[2, 3]` or `nothing`.
  """
  ours, theirs = _arrays(tree), _arrays(expected)
  for name in sorted(ours.keys() | theirs.keys()):
    if ours.get(name) != theirs.get(name):
      return name, ours.get(name, "nothing"), theirs.get(name, "nothing")
  return None


def _arrays(tree: Any) -> dict[str, str]:
  """Dtype and shape of each array of a pytree, by its name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def check_config(where: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
  """Refuses (ValueError) a checkpoint of another config; the message lists the fields that differ.

  Args:
    where: the checkpoint, for the message.
    saved: nested fields (JSON types) of the checkpoint.
    current: nested fields of the run.
  """
  old, new = (traverse_util.flatten_dict(config, sep=".") for config in (saved, current))
  differences = []
  for name in sorted(old.keys() | new.keys()):
    there, here = old.get(name, "absent"), new.get(name, "absent")
    if there != here and name not in _SAME_RESULTS:
      differences.append(f"{name} is {there} there and {here} here")
  if differences:
    raise ValueError(
      f"{where} is a checkpoint of another config: {'; '.join(differences)}. Give the same "
      "values, or another --workdir"
    )


def config_of(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """The config of the trained model in a working folder, or in a folder with a model file.

  Raises:
    FileNotFoundError: nothing was trained there.
    ValueError: its config.json is damaged.
  """
  path = files.fetch(workdir) / CONFIG_FILE
  model = path.with_name(MODEL_FILE)
  if model.exists() and not path.exists():
    return read_file(model).config
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: name a folder that a model was trained in")
  with trust.json_of(path, {}, "train again") as manifest:
    return trust.config(files.unseal(manifest)["config"])


def read(place: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> Artefact:
  """The model of a working folder, or of a model file.

  Process 0 reads; all processes get its result.

  Args:
    place: a folder with `model.npz`, such as one that a model was trained in, or a model file.
    config: expected config of the model; unless given, its config of training.

  Raises:
    FileNotFoundError: nothing was trained there.
    ValueError: the model is damaged, of a newer version or of another config.
  """
  path = files.fetch(place)
  artefact = parallel.on_primary(lambda: _of_folder(path) if path.is_dir() else read_file(path))
  if config is not None:
    saved, current = fingerprint(artefact.config), fingerprint(config)
    if trust.not_imported(saved["extensions"]):  # they have the losses alone: the config was made
      saved |= {name: current[name] for name in ("loss", "extensions")}
    check_config(path, saved, current)
  return artefact


def state_of(place: Path) -> tuple[Any, ...]:
  """What changes whenever `read` would return another model, as the key of a cache.

  The state of the files alone does not tell two images of a disk apart. The card, which has the
  checksum of the parameters, does.
  """
  model = place if place.is_file() else place / MODEL_FILE
  paths = [path for path in (model, model.with_name(TRANSFORMS_FILE)) if path.is_file()]
  state: list[Any] = [files.state_of(path) for path in paths]
  with contextlib.suppress(ValueError, OSError):  # `read` says what is wrong
    with npz.NpzArchive(model, most_bytes=MOST_BYTES) as archive:
      state.append(hashlib.sha256(archive.read("card")).digest())
  return tuple(state)


def _of_folder(folder: Path) -> Artefact:
  """The model file of a folder; refuses (ValueError) one of another run than the transforms."""
  artefact, path = read_file(folder / MODEL_FILE), folder / TRANSFORMS_FILE
  plain = lambda transforms: {name: fitted.to_dict() for name, fitted in transforms.items()}
  if path.exists() and plain(transforms.load(path)) != plain(artefact.transforms):
    raise ValueError(
      f"{folder / MODEL_FILE} is of another run than {TRANSFORMS_FILE} beside it: put the files of "
      "one run there, or train again in another --workdir"
    )
  return artefact


# Models in the package, each with a card.


def shipped_names() -> list[str]:
  """Names of the models that ship, such as `layout-v3-estimate`."""
  return [path.stem for path in files.visible(SHIPPED, "*.npz")]


def shipped_file(place: str | os.PathLike[str]) -> Path:
  """The file of a model that ships, if `place` is its name; otherwise the path of `place`.

  The name of a model that ships is that model, whatever the current folder has: `./NAME` is a
  folder there.

  Raises:
    FileNotFoundError: `place` is a name of neither a file nor a model that ships.
  """
  name, path = os.fspath(place), files.expanded(place)
  if name in shipped_names():
    return SHIPPED / f"{name}.npz"
  if os.path.dirname(name) or path.exists():
    return path
  raise FileNotFoundError(
    f"{name} is missing: name a folder that a model was trained in, a model file, or a model that "
    f"ships ({', '.join(shipped_names())})"
  )


def card(name: str) -> str:
  """The card of a model that ships, in Markdown: its training data and its scores.

  Raises:
    ValueError: no model of that name ships.
  """
  if name not in shipped_names():
    raise ValueError(f"no model {name!r} ships, expected one of {', '.join(shipped_names())}")
  return (SHIPPED / f"{name}.md").read_text()
