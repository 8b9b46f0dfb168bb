"""Runs that fill their disk, a small file system, at different moments, and are then resumed."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from pathlib import Path
import shutil
import subprocess

from tests.support import commands
from tools.faults.kills import contents, different, leftovers
from tools.faults.table import Row


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[bool]:
  """Mounts a tmpfs of `kib` KiB at `folder`; yields False if this user may not mount one."""
  folder.mkdir(parents=True, exist_ok=True)
  mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
  try:
    is_there = not subprocess.run(mount, capture_output=True).returncode
  except FileNotFoundError:
    is_there = False
  try:
    yield is_there
  finally:
    if is_there:
      subprocess.run(["umount", str(folder)], check=True)


def rows(
  command: list[str], whole: Path, folder: Path, sizes: list[int], *, home: Path
) -> Iterator[Row]:
  """Runs on disks of the given sizes, copies the working folders to a large disk, and resumes.

  Args:
    command: command of the run, without `--workdir`.
    whole: working folder of an undisturbed run.
    folder: folder for the disks and working folders.
    sizes: sizes of the disks in KiB.
    home: see `commands.run_all`.
  """
  row = Row("disk full")
  for size in sizes:
    disk, roomy = folder / f"disk_{size}", folder / f"roomy_{size}"
    with small_disk(disk, size) as is_there:
      if not is_there:
        row.fault = "disk full (not tried: no tmpfs can be mounted here)"
        break
      workdir = disk / "workdir"
      (ended,) = commands.run_all([commands.Run([*command, f"--workdir={workdir}"])], home=home)
      if workdir.exists():
        shutil.copytree(workdir, roomy)
    (resumed,) = commands.run_all(
      [commands.Run([*command, f"--workdir={roomy}", "--resume"])], home=home
    )
    row.count(outcome(ended, resumed, roomy, whole), of=f"{size} KiB")
  yield row


def outcome(disturbed: commands.Ended, resumed: commands.Ended, workdir: Path, whole: Path) -> str:
  """Outcome of a disturbed run and its resumed run: `survived`, `refused`, or what went wrong.

  Args:
    disturbed: how the disturbed run ended.
    resumed: how the resumed run ended.
    workdir: their working folder.
    whole: working folder of an undisturbed run.
  """
  said = [line for line in disturbed.err.splitlines() if line.startswith("error: ")]
  if "Traceback" in disturbed.err or (disturbed.code and len(said) != 1):
    return f"the disturbed run: {disturbed.err[-500:]}"
  if resumed.code:
    return f"the resumed run ended with {resumed.code}: {resumed.err[-500:]}"
  if left := leftovers(workdir):
    return f"left over: {left}"
  difference = different(contents(workdir), contents(whole))
  return "refused" if disturbed.code and difference == "survived" else difference
