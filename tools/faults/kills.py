"""Kills runs at file operations, resumes them, and compares them with an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import mmap
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np

from tests.support import commands, run_folders
from tools.faults.table import Row
from tpugraphs_jax.data import store

_SHORT = (
  "--config.train.epochs=2",
  "--config.train.log_every_steps=1",
  "--config.train.checkpoint_every_steps=3",
)
SMALL = ("--config.model.hidden_dim=8", *_SHORT)
_COMMANDS = {
  "tile": ("run_tile.py", "configs/tile.py:ci", *SMALL),
  "layout": ("run_layout.py", "configs/layout.py:xla-random,full,ci", *SMALL),
  "several layouts": (
    "run_layout.py",
    "configs/layout.py:xla-random,preset=fifth_all,ci",
    *_SHORT,
    "--config.data.also=('layout:nlp:default',)",
  ),
  "segments": ("run_layout.py", "configs/layout.py:xla-random,gst_ed,ci", *SMALL),
  "segments and head": (
    "run_layout.py",
    "configs/layout.py:xla-random,gst_efd,ci",
    *SMALL,
    "--config.segments.finetune.epochs=1",
  ),
}
MODES = tuple(_COMMANDS)  # each builds its store, trains, evaluates and predicts

_LONGEST_SECONDS = 900.0  # limit for a command that is not killed


class Kills:
  """Runs of one mode that are killed.

  Args:
    mode: one of `MODES`.
    folder: folder for the working folders.
    data_root: tiny synthetic data.
  """

  def __init__(self, mode: str, folder: Path, data_root: Path):
    self.row = Row(f"SIGKILL, {mode}")
    self._mode, self._data_root = mode, data_root
    self._folder = folder / mode.replace(" ", "_")
    self._home = self._folder / "home"
    self._home.mkdir(parents=True)
    (self._whole,) = self._run([self._command("whole")])
    assert self._whole.code == 0, self._whole.err

  def _command(self, name: str, *flags: str, kill_at: int = 0) -> commands.Run:
    script, config, *more = _COMMANDS[self._mode]
    workdir = self._folder / name
    if script == "run_layout.py":
      more = [*more, f"--config.data.store_dir={workdir / 'store'}"]
    return commands.Run(
      [
        script,
        f"--config={config}",
        *more,
        f"--data_root={self._data_root}",
        f"--workdir={workdir}",
        *flags,
      ],
      watched=str(workdir),
      kill_at=kill_at,
    )

  def _run(self, runs: Sequence[commands.Run]) -> list[commands.Ended]:
    return commands.run_all(runs, home=self._home)

  def try_points(self, points: int, rng: np.random.Generator) -> None:
    """Kills `points` runs at random file operations, every third one again while it is resumed."""
    runs, first = [], self.row.tried
    numbers = rng.integers(1, self._whole.operations + 1, (points, 2))
    for place, (once, again) in enumerate(numbers, start=first):
      twice = [self._command(f"killed_{place}", "--resume", kill_at=int(again))] * (place % 3 == 2)
      runs += [
        self._command(f"killed_{place}", kill_at=int(once)),
        *twice,
        self._command(f"killed_{place}", "--resume"),
      ]
    last = {}
    for run, ended in zip(runs, self._run(runs)):
      workdir = Path(run.watched)
      last[workdir] = ended
    for (workdir, ended), (once, again) in zip(last.items(), numbers):
      self.row.count(self._outcome(workdir, ended), of=f"{self._mode} at {once}, then {again}")
      shutil.rmtree(workdir)

  def _outcome(self, workdir: Path, ended: commands.Ended) -> str:
    if ended.code:
      return f"the resumed run ended with {ended.code}: {ended.err[-600:]}"
    if left := leftovers(workdir):
      return f"left over: {left}"
    return different(contents(workdir), contents(self._folder / "whole"))


class StoreKills:
  """Builders of a store that are killed; each is a fork of this process.

  Args:
    folder: folder for the stores.
    data_root: tiny synthetic data with a layout collection.
  """

  def __init__(self, folder: Path, data_root: Path):
    self.row = Row("SIGKILL, store build")
    self._folder, self._data_root = folder / "stores", data_root
    self._operations, ended = self._build("whole")
    assert ended == 0

  def _build(self, name: str, *, kill_at: int = 0) -> tuple[int, int]:
    """Number of file operations and exit code of a builder."""
    operations, child = mmap.mmap(-1, 8), os.fork()
    if not child:
      commands.count_operations(str(self._folder), operations, kill_at=kill_at)
      try:
        store.ensure_store(
          self._data_root, "layout:xla:random", "train", workers=1, store_dir=self._folder / name
        )
        os._exit(0)
      finally:
        os._exit(1)
    _, status = os.waitpid(child, 0)
    return int.from_bytes(operations[:], "little"), os.waitstatus_to_exitcode(status)

  def try_points(self, points: int, rng: np.random.Generator) -> None:
    """Kills `points` builders at random file operations; every second time also the next one."""
    for place, numbers in enumerate(rng.integers(1, self._operations + 1, (points, 2)).tolist()):
      for kill_at in numbers[: 1 + place % 2]:
        self._build("killed", kill_at=kill_at)
      self.row.count(self._outcome(self._build("killed")[1]), of=f"operations {numbers}")
      shutil.rmtree(self._folder / "killed")

  def _outcome(self, code: int) -> str:
    if code:
      return f"the next builder ended with {code}"
    return different(*(all_files(self._folder / name) for name in ("killed", "whole")))


_PROGRAM = """
import jax, jax.numpy as jnp

def net(kernel, x):
  dims = ("NHWC", "HWIO", "NHWC")
  return jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims))

shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
PROGRAMS = {"net": (net, (shape(3, 3, 5, 8), shape(3, 7, 6, 5)))}
"""


class CommandKills:
  """A command of several processes that is killed as a whole, at random times.

  Args:
    mode: name of the command in the table.
    folder: folder for the output of the command.
    arguments: function from an output folder to the arguments of the Python interpreter.
    what_counts: function from an output folder to the results that must equal those of an
      undisturbed command, by name.
  """

  def __init__(
    self,
    mode: str,
    folder: Path,
    arguments: Callable[[Path], list[str]],
    what_counts: Callable[[Path], dict[str, object]],
  ):
    self.row = Row(f"SIGKILL, {mode}")
    self._folder, self._arguments, self._what_counts = folder, arguments, what_counts
    folder.mkdir(parents=True)
    started = time.monotonic()
    code, said = self._run(folder / "whole", seconds=_LONGEST_SECONDS)
    assert code == 0, said
    self._seconds = time.monotonic() - started

  def _run(self, out: Path, *, seconds: float) -> tuple[int, str]:
    """Runs the command, killing all of its processes after `seconds`; exit code and output."""
    environment = os.environ | {"PYTHONPATH": str(commands.ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
      [sys.executable, *self._arguments(out)],
      env=environment,
      start_new_session=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    ) as process:
      try:
        return process.wait(seconds), process.stdout.read()
      except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return -signal.SIGKILL, ""

  def try_points(self, points: int, rng: np.random.Generator) -> None:
    """Kills `points` commands at random times, every second one again after its restart."""
    for place in range(points):
      out, times = self._folder / "killed", rng.random(1 + place % 2)
      for share in times:
        self._run(out, seconds=share * self._seconds)
      self.row.count(self._outcome(out), of=f"after shares {times} of {self._seconds:.0f} s")
      shutil.rmtree(out)

  def _outcome(self, out: Path) -> str:
    code, said = self._run(out, seconds=_LONGEST_SECONDS)
    if code:
      return f"the command that went on ended with {code}: {said[-600:]}"
    return different(self._what_counts(out), self._what_counts(self._folder / "whole"))


def collecting(folder: Path) -> CommandKills:
  """Kills of `tpugraphs_jax.collect` on one small program."""
  folder.mkdir(parents=True)
  (folder / "tried.py").write_text(_PROGRAM)

  def arguments(out: Path) -> list[str]:
    return [
      "-m",
      "tpugraphs_jax.collect",
      "--programs",
      f"{folder}/tried.py:net",
      "--quiet",
      "--label",
      "bytes_estimate",
      "--configs",
      "12",
      "--out",
      str(out),
      "--collection",
      "layout:own:tried",
    ]

  return CommandKills("collect", folder / "runs", arguments, lambda out: all_files(out / "npz"))


def sweeping(folder: Path, data_root: Path) -> CommandKills:
  """Kills of a sweep of two runs, one after the other."""

  def arguments(out: Path) -> list[str]:
    return [
      "-m",
      "tpugraphs_jax.sweep",
      "--config=tile.py:ci",
      "--seeds=2",
      f"--out={out}",
      f"--data_root={data_root}",
      *SMALL,
    ]

  return CommandKills(
    "sweep",
    folder,
    arguments,
    lambda out: {
      f"{run.name} {name}": value
      for run in sorted((out / "base").iterdir())
      for name, value in contents(run).items()
    },
  )


def all_files(folder: Path) -> dict[str, bytes]:
  """The files in a folder and below it, by name."""
  return {
    str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
  }


def leftovers(workdir: Path) -> list[str]:
  """Temporary files and surplus checkpoints that a finished run should not leave behind."""
  names = [
    str(path.relative_to(workdir))
    for path in workdir.rglob("*")
    if path.name.endswith(".partial") or "orbax-checkpoint-tmp" in path.name
  ]
  for folder in workdir.rglob("checkpoints"):
    entries = sorted(path.name for path in folder.iterdir())
    names += [f"{len(entries)} of {entries}"] * (len(entries) > 2)
  return names


def contents(workdir: Path) -> dict[str, object]:
  """Files, metrics and last parameters of a run that must not depend on kills, by name."""
  result = {
    str(path.relative_to(workdir)): path.read_bytes()
    for name in ("features.json", "validation.csv", "results.csv", "model.npz")
    for path in (workdir / name, *workdir.glob(f"also/*/{name}"))
    if path.exists()
  }
  for path in sorted(workdir.rglob("metrics.jsonl")):
    result[str(path.relative_to(workdir))] = run_folders.metrics(path.parent)
  newest = run_folders.newest_checkpoint(workdir)
  arrays = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(newest.params)]
  return result | {"checkpoint": (newest.step, arrays)}


def different(contents: Mapping[str, object], expected: Mapping[str, object]) -> str:
  """`survived` where both have the same results by name, else the names that differ."""
  names = sorted(
    name for name in contents.keys() | expected.keys() if contents.get(name) != expected.get(name)
  )
  return f"other results: {names}" if names else "survived"
