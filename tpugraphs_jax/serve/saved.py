"""What a working folder holds of a trained model, also one of an older version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import json
import os
from pathlib import Path
from typing import Any


from tpugraphs_jax import files as files_lib, parallel, registry, remote
from tpugraphs_jax.data import features
from tpugraphs_jax.serve import artefact
from tpugraphs_jax.serve.artefact import Artefact
from tpugraphs_jax.train import checkpoint, loop

CONFIG_FILE, TRANSFORMS_FILE = "config.json", "features.json"
HEAD_FOLDER = "head"  # of the second phase of Graph Segment Training with fine-tuning
# What may differ between the run that trained a model and one that uses it.
_FREE_FIELDS = ("eval", "train", "profile_steps", "data_root")
_FREE_DATA_FIELDS = (
    "skip_bad_files", "store_dir", "extra_dir", "loader_threads", "neighbour_slots")


def upgrade(config: Mapping[str, Any]) -> dict[str, Any]:
  """A saved config, with `data.also` where it lacks it: shipped models came before that field."""
  data = dict(config["data"])
  if config["task"] != "tile":
    data.setdefault("also", ())
  return {**config, "data": data}


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
  model = path.with_name(artefact.FILE)
  is_trained_here = (path.parent / loop.CHECKPOINTS).is_dir()
  if model.exists() and not path.exists() and not is_trained_here:
    return upgrade(artefact.load(model).config)
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: --workdir must name a folder that a model was "
                            "trained in")
  try:
    manifest = files_lib.unsealed(json.loads(path.read_text()))
    return upgrade(artefact.with_tuples(manifest["config"]))
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
  folder = workdir / (HEAD_FOLDER if is_tuned else "") / loop.CHECKPOINTS
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
      found = artefact.load(path / artefact.FILE if path.is_dir() or not path.suffix else path)
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
