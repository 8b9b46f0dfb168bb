"""Checkpoints: which evaluation is the best, and the two newest states, to resume from.

`Progress` decides which evaluation makes the model; `train.training` writes its parameters to
`model.npz`, so that no checkpoint holds them. The older of the two states is there in case the
newest is damaged.

Orbax writes and removes checkpoints. This module adds checks of the config and of other files of
the run, a checksum of the state, atomic removal, and errors of one line.

Checkpoints are numbered in the order of saving, not by training step: when an evaluation is
interrupted, its step is saved twice. In a run of several processes process 0 alone reads and
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import errno
import json
import logging
import math
import os
from pathlib import Path
import shutil
import sys
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from tpugraphs_jax.infra import machine, parallel
from tpugraphs_jax.infra.files import digest_of_arrays, expanded, make_folder, seal, unseal
from tpugraphs_jax.rankers import model_file

FOLDER = "checkpoints"  # under the working folder
_CHECKSUM = "state_sha256"  # a field of the notes
_TRASH = "superseded"  # folder of checkpoints that are being removed
_PREFIX = "save"  # folders are save_0, save_1, ...
_KEPT = 2
_FIELDS = "step", "config", "data", "progress", "files", _CHECKSUM  # of the notes
_DISK_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Saved:
  """The content of one checkpoint."""

  step: int
  state: Any  # pytree of numpy arrays, without a device axis
  data: Any  # state of the data iterator (JSON types)
  progress: dict[str, Any]  # bookkeeping of the loop (JSON types)


@dataclasses.dataclass
class Progress:
  """Bookkeeping of the loop, saved with every checkpoint."""

  # The best evaluation so far, or with `result=last` the newest one; its step becomes the model.
  # None before an evaluation that gives a number.
  best_value: float | None = None
  best_step: int | None = None
  evaluated_step: int = 0  # step of the last evaluation
  # Metrics of each step since the last row.
  window: list[dict[str, float]] = dataclasses.field(default_factory=list)
  # The next row, which may wait for the evaluation of its step.
  row: dict[str, float] = dataclasses.field(default_factory=dict)

  def keep_best(self, step: int, metrics: Mapping[str, float], *, of: str, last: bool) -> bool:
    """Notes an evaluation; returns whether it makes the model.

    Args:
      step: training steps before the evaluation.
      metrics: of the evaluation, by name.
      of: name of the metric to maximise; the first of equal values is the best.
      last: the newest evaluation makes the model, not the best one.

    Raises:
      ValueError: the metric is missing.
    """
    if of not in metrics:
      raise ValueError(f"best_metric is {of!r}, expected one of {sorted(metrics)}")
    value, self.evaluated_step = metrics[of], step
    if last or value > (-math.inf if self.best_value is None else self.best_value):
      self.best_value, self.best_step = value, step
    return self.best_step == step


class Checkpoints:
  """The checkpoints of one working folder.

  Args:
    folder: of the checkpoints; created if missing.
    config: nested fields (JSON types) that a checkpoint must have to be restored, without
      fields that may change between two runs.
    digests: SHA-256 of other files that a run reads, by path within its working folder. Other
      digests in a checkpoint are an error.
    read_only: changes nothing on disk. Another run may save at the same time.

  Attributes:
    saved_step: training steps of the newest checkpoint, once it is read or saved; 0 without one.

  Raises:
    ValueError: the folder is damaged, or has a link where checkpoints are written.
  """

  def __init__(
    self,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
    read_only: bool = False,
  ):
    self._workdir, self._folder = Path(folder).parent, expanded(folder).absolute()
    self._config, self._digests = _as_json(config or {}), dict(digests or {})
    self.saved_step = 0
    # None in processes other than 0, and without a folder to read.
    self._manager: ocp.CheckpointManager | None = None
    if machine.is_primary() and (self._folder.is_dir() or not read_only):
      if not read_only:
        make_folder(self._folder)
      try:
        self._manager = self._create_manager(read_only)
      except (ValueError, KeyError, TypeError) as error:  # damaged metadata
        raise _damaged(self._folder / f"{_PREFIX}_*", error) from None

  def _create_manager(self, read_only: bool) -> ocp.CheckpointManager:
    _quiet_orbax()
    processes = ocp.options.MultiprocessingOptions(
      primary_host=0, active_processes={0}, barrier_sync_key_prefix="checkpoints"
    )
    options = ocp.CheckpointManagerOptions(
      max_to_keep=_KEPT,
      step_prefix=_PREFIX,
      todelete_subdir=None if read_only else _TRASH,  # atomic removal
      create=False,
      read_only=read_only,
      cleanup_tmp_directories=not read_only,
      save_interval_steps=0 if read_only else 1,
      enable_async_checkpointing=False,
      multiprocessing_options=processes,
    )
    manager = ocp.CheckpointManager(self._folder, options=options)
    if not read_only:
      for number in sorted(manager.all_steps())[:-_KEPT]:  # a killed run left them
        manager.delete(number)
      self._empty_trash()
    return manager

  def _empty_trash(self) -> None:
    shutil.rmtree(self._folder / _TRASH, ignore_errors=True)

  def save(self, step: int, state: Any, *, data: Any, progress: Mapping[str, Any]) -> None:
    """Saves a state without a device axis.

    Args:
      step: training steps taken.
      state: pytree of numpy arrays.
      data: state of the data iterator.
      progress: bookkeeping of the loop.

    Raises:
      OSError: not written, for example because the disk is full. Earlier checkpoints stay.
    """
    self._write(step, state, data, progress)
    self.saved_step = step

  def _write(self, step: int, state: Any, data: Any, progress: Mapping[str, Any]) -> None:
    if self._manager is None:
      return
    notes = {
      "step": step,
      "config": self._config,
      "data": data,
      "progress": dict(progress),
      "files": self._digests,
      _CHECKSUM: digest_of_arrays(jax.tree.leaves(state)),
    }
    newest = self._manager.latest_step()
    number = 0 if newest is None else newest + 1
    saved_notes = ocp.args.JsonSave(seal(_as_json(notes)))
    items = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=saved_notes)
    try:
      self._manager.save(number, args=items, force=True)
    except (OSError, ValueError, RuntimeError) as error:
      reason = _reason(error)
      advice = "free some space, then " * (reason in _DISK_FULL)
      raise OSError(
        f"{self._folder}: checkpoint of step {step} not written ({reason}). Earlier checkpoints "
        f"are untouched: {advice}go on with --resume"
      ) from error
    self._empty_trash()

  def check(self, *, resume: bool) -> None:
    """Refuses (ValueError) a run with another config or other files; every run without `resume`."""

    def check(manager: ocp.CheckpointManager) -> None:
      notes = self._newest_notes(manager)
      if notes and not resume:
        raise ValueError(
          f"{self._workdir} holds a run already (checkpoint of step {notes['step']}): go on "
          "with --resume, or give another --workdir"
        )
      if notes:
        model_file.check_config(self._folder, notes["config"], self._config)
        check_files(self._folder, notes["files"], self._digests)

    self._on_primary(check)

  def newest(self, template: Any) -> Saved | None:
    """The newest checkpoint; None without one.

    Args:
      template: a state with the expected shapes and dtypes.

    Raises:
      ValueError: it has another config or other files, or does not fit the template.
    """
    saved = self._on_primary(lambda manager: self._read(manager, template))
    self.saved_step = saved.step if saved else 0
    return saved

  def _on_primary(self, read: Callable[[ocp.CheckpointManager], Result]) -> Result | None:
    """The result or error of `read` in process 0, in every process; None without a folder."""
    return parallel.on_primary(lambda: None if self._manager is None else read(self._manager))

  def _read(self, manager: ocp.CheckpointManager, template: Any) -> Saved | None:
    if (notes := self._newest_notes(manager)) is None:
      return None
    where = self._newest_path(manager)
    model_file.check_config(where, notes["config"], self._config)
    check_files(where, notes["files"], self._digests)
    host = jax.tree.map(np.asarray, template)  # NumPy arrays can be restored on any device
    state = self._restore_state(manager, host)
    if difference := model_file.first_difference(state, host):
      name, there, here = difference
      raise ValueError(f"{where} does not fit this model: {name} is {there} there and {here} here")
    if notes[_CHECKSUM] != digest_of_arrays(jax.tree.leaves(state)):
      raise _damaged(where, "its checksum does not fit")
    return Saved(notes["step"], state, notes["data"], notes["progress"])

  def _newest_path(self, manager: ocp.CheckpointManager) -> Path:
    return self._folder / f"{_PREFIX}_{manager.latest_step()}"

  def _newest_notes(self, manager: ocp.CheckpointManager) -> dict[str, Any] | None:
    if manager.latest_step() is None:
      return None
    items = ocp.args.Composite(notes=ocp.args.JsonRestore())
    try:
      notes = unseal(manager.restore(manager.latest_step(), args=items).notes)
      return {name: notes[name] for name in _FIELDS}
    except Exception as error:  # Orbax raises a dozen types
      raise _damaged(self._newest_path(manager), error) from None

  def _restore_state(self, manager: ocp.CheckpointManager, template: Any) -> Any:
    items = ocp.args.Composite(state=ocp.args.StandardRestore(template))
    try:
      return manager.restore(manager.latest_step(), args=items).state
    except Exception as error:  # see above
      message = "; ".join(str(error).splitlines()[:3])
      raise ValueError(
        f"{self._newest_path(manager)} does not fit this model, or is damaged: {message}"
      ) from None

  def close(self) -> None:
    if self._manager is not None:
      self._manager.close()


def check_files(where: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
  """Refuses (ValueError) a checkpoint whose run read another version of a file.

  Args:
    where: the checkpoint, for the message.
    saved: digests in the checkpoint, by path within the working folder.
    current: digests of the present files. Only paths in both are compared.
  """
  for name in sorted(saved.keys() & current.keys()):
    if saved[name] != current[name]:
      raise ValueError(
        f"{name} is of another run: it is not the file that {where} was trained with. Put that "
        "file back, or train again in another --workdir"
      )


def _damaged(where: Path, error: object) -> ValueError:
  return ValueError(
    f"{where} is damaged ({_reason(error)}): remove it to go on from the checkpoint before "
    "it, or train again in another --workdir"
  )


def _as_json(value: Any) -> Any:
  """A copy in JSON types, as read from a file."""
  return json.loads(json.dumps(value, default=lambda number: number.tolist()))  # of NumPy's types


def _is_shown(record: logging.LogRecord) -> bool:
  """False for the messages of Orbax and its tasks: errors are raised as well."""
  is_of_task = record.name == "asyncio" and "/orbax/" in str(record.msg)  # has the file's path
  return not is_of_task and "/orbax/" not in record.pathname.replace("\\", "/")


def _quiet_orbax() -> None:
  """Drops the messages of Orbax, dozens of lines per checkpoint."""
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_shown)  # once, however often it is added
  if not isinstance(sys.unraisablehook, _WithoutReaders):
    sys.unraisablehook = _WithoutReaders(sys.unraisablehook)


class _WithoutReaders:
  """A hook of `sys.unraisablehook` without the tracebacks of TensorStore's threads.

  At the first damaged array Orbax ends its event loop. The threads that read the other arrays then
  report that the loop is closed, each with a traceback, before the line about the damage.
  """

  def __init__(self, earlier: Callable[[Any], object]):
    self._earlier = earlier

  def __call__(self, unraisable: Any) -> None:
    trace = unraisable.exc_traceback
    is_reader = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
    if not (is_reader and str(unraisable.exc_value) == "Event loop is closed"):
      self._earlier(unraisable)


def _reason(error: object) -> str:
  """An error of Orbax in one line; Orbax reports a full disk in pages of settings."""
  full = next((reason for reason in _DISK_FULL if reason in str(error)), "")
  return full or (str(error).splitlines() or [type(error).__name__])[0]
