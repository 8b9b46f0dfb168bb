"""Runs of the two commands in working folders, which are kept: a second call trains nothing."""

from __future__ import annotations

from collections.abc import Iterable
import csv
import json
from pathlib import Path
import resource
import subprocess
import sys

ROOT = Path(__file__).parents[1]


def train(kind: str, variants: Iterable[str], data_root: str, workdir: Path, *flags: str) -> float:
  """CPU seconds of a command, which runs or continues unless it has ended before.

  Args:
    kind: `tile` or `layout`.
    variants: of the config file of the kind; empty ones are left out.
    data_root: folder with tile/ and layout/.
    workdir: working folder.
    *flags: further flags.
  """
  ended = workdir / "cpu_s.json"
  if not ended.exists():
    config = ":".join(filter(None, [f"configs/{kind}.py", ",".join(filter(None, variants))]))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
      [
        sys.executable,
        f"run_{kind}.py",
        f"--config={config}",
        f"--data_root={data_root}",
        f"--workdir={workdir}",
        "--resume",
        "--noreport",
        *flags,
      ],
      cwd=ROOT,
      check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended.write_text(
      json.dumps(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    )
  return json.loads(ended.read_text())


def validation(workdir: Path, column: str) -> dict[str, float]:
  """A column of `validation.csv` by graph."""
  with (workdir / "validation.csv").open() as file:
    return {row["graph"]: float(row[column]) for row in csv.DictReader(file)}
