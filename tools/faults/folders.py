"""Removes the folders of a run or makes them read-only, restores them, and resumes the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
import shutil
import subprocess
from typing import NamedTuple

from tests.support import commands
from tools.faults import disk
from tools.faults.table import Row

_STEP = 5  # after the first checkpoints, before the last ones
_DISK_KIB = 64 * 1024


class Case(NamedTuple):
  """What happens to the folders of a run.

  Attributes:
    name: name of the case in messages.
    line: shell command at step 5; {work}, {store} and {data} stand for folders, and {disk}
      for the folder that contains them.
    before: shell command before the run.
    after: shell command that restores the folders.
    must: the only right outcome, `survived` or `refused`; empty if both are right.
  """

  name: str
  line: str = ""
  before: str = ""
  after: str = ""
  must: str = ""


_READ_ONLY, _WRITABLE = "mount -o remount,ro {disk}", "mount -o remount,rw {disk}"
# A disk with open files cannot be made read-only, but a bind mount over it can.
_COVER = "mount --bind {work} {work} && mount -o remount,bind,ro {work}"
_PLACES = {
  "working folder": "{work}",
  "checkpoints": "{work}/checkpoints",
  "store": "{store}",
  "data": "{data}",
  "config.json": "{work}/config.json",
  "metrics.jsonl": "{work}/metrics.jsonl",
}
VANISHED = tuple(
  Case(f"{what} gone", f"mv {place} {place}.gone", after=f"rm -rf {place}; mv {place}.gone {place}")
  for what, place in _PLACES.items()
)
SHORT = tuple(case for case in VANISHED if case.name in ("checkpoints gone", "data gone"))
READ_ONLY = (
  Case("becomes read-only", _COVER, after="umount {work}", must="refused"),
  Case("read-only before the run", before=_READ_ONLY, after=_WRITABLE, must="refused"),
)


def rows(
  command: list[str],
  whole: Path,
  folder: Path,
  data_root: Path,
  *,
  home: Path,
  vanished: Sequence[Case] = VANISHED,
  read_only: Sequence[Case] = READ_ONLY,
) -> Iterator[Row]:
  """Yields a row for folders that vanish, and one for read-only folders.

  Args:
    command: command of a layout run, without data, store and working folder.
    whole: working folder of an undisturbed run.
    folder: folder for the folders of the runs.
    data_root: tiny synthetic data.
    home: see `commands.run_all`.
    vanished: cases in which a folder is moved away.
    read_only: cases in which a folder becomes read-only; each gets a disk of its own.
  """
  row = Row("folders that vanish under a run and come back")
  for case in vanished:
    row.count(
      _try(case, command, whole, folder / case.name.replace(" ", "_"), data_root, home),
      of=case.name,
    )
  yield row
  if not read_only:
    return
  row = Row("read-only disks")
  for case in read_only:
    place = folder / case.name.replace(" ", "_")
    with disk.small_disk(place, _DISK_KIB) as is_there:
      if not is_there:
        row.fault += " (not tried: no tmpfs can be mounted here)"
        break
      row.count(_try(case, command, whole, place, data_root, home), of=case.name)
  yield row


def _try(
  case: Case, command: list[str], whole: Path, folder: Path, data_root: Path, home: Path
) -> str:
  places = {
    "work": folder / "workdir",
    "store": folder / "store",
    "data": folder / "data",
    "disk": folder,
  }
  shutil.copytree(data_root, places["data"])
  run = commands.Run(
    [
      *command,
      f"--data_root={places['data']}",
      f"--config.data.store_dir={places['store']}",
      f"--workdir={places['work']}",
    ]
  )
  if case.before:
    subprocess.run(case.before.format(**places), shell=True, check=True)
  disturbed = run._replace(shell_at_step=(_STEP, case.line.format(**places))) if case.line else run
  (ended,) = commands.run_all([disturbed], home=home)
  if case.after:
    subprocess.run(case.after.format(**places), shell=True, check=True)
  (resumed,) = commands.run_all([run._replace(arguments=[*run.arguments, "--resume"])], home=home)
  outcome_here = disk.outcome(ended, resumed, places["work"], whole)
  is_wrong = outcome_here in ("survived", "refused") and case.must not in ("", outcome_here)
  return f"{outcome_here}, expected {case.must}" if is_wrong else outcome_here
