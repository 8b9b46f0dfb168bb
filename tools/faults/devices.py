"""Stops runs, resumes them on another number of devices, and compares the losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import itertools
from pathlib import Path

import numpy as np

from tests.support import commands, run_folders
from tools.faults import kills
from tools.faults.table import Row

PAIRS = tuple(itertools.permutations((1, 2, 4), 2))
SHORT = ((1, 4), (4, 2))
_TASKS = {
  "tile": ("run_tile.py", "tile.py:ci"),
  "layout": ("run_layout.py", "layout.py:xla-random,full,ci"),
}
_STOP = 3  # the step after which a run is stopped
_RTOL = 1e-4  # losses are summed over devices in another order


def rows(
  folder: Path,
  data_root: Path,
  *,
  home: Path,
  pairs: Sequence[tuple[int, int]] = PAIRS,
  tasks: Sequence[str] = tuple(_TASKS),
) -> Iterator[Row]:
  """Yields a row for each task.

  Args:
    folder: folder for the working folders.
    data_root: tiny synthetic data.
    home: see `commands.run_all`.
    pairs: numbers of devices before the stop and after it.
    tasks: keys of `_TASKS`.
  """
  for task in tasks:
    row = Row(f"stopped, {task}, resumed with another number of devices (1, 2, 4)")
    script, config = _TASKS[task]
    command = lambda workdir, *flags, **how: commands.Run(
      [
        script,
        f"--config=configs/{config}",
        *kills.SMALL,
        "--config.batch.graphs=4",  # divides by 1, 2 and 4 devices
        f"--data_root={data_root}",
        f"--workdir={workdir}",
        "--do=train",
        *flags,
      ],
      **how,
    )
    runs = [command(folder / task / "whole")]
    for before, after in pairs:
      workdir = folder / task / f"{before}_{after}"
      runs += [
        command(workdir, devices=before, stop_at_step=_STOP),
        command(workdir, "--resume", devices=after),
      ]
    ended = commands.run_all(runs, home=home)
    assert ended[0].code == 0, ended[0].err
    expected = losses(folder / task / "whole")
    for (before, after), stopped, resumed in zip(pairs, ended[1::2], ended[2::2], strict=True):
      workdir = folder / task / f"{before}_{after}"
      row.count(_outcome(stopped, resumed, workdir, expected), of=f"{before}, then {after} devices")
    yield row


def losses(workdir: Path) -> dict[int, float]:
  """The training loss of a run, by step."""
  rows = run_folders.metrics(workdir)
  return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def _outcome(
  stopped: commands.Ended, resumed: commands.Ended, workdir: Path, expected: dict[int, float]
) -> str:
  if f"saved step {_STOP}" not in stopped.out + stopped.err:
    return f"was not stopped at step {_STOP}: {stopped.err[-300:]}"
  if resumed.code or f"resumed at step {_STOP}" not in resumed.out:
    return f"the resumed run ended with {resumed.code}: {resumed.err[-300:]}"
  losses_here = losses(workdir)
  if losses_here.keys() != expected.keys():
    return f"steps {sorted(losses_here)}, expected {sorted(expected)}"
  worst = max(abs(losses_here[step] / expected[step] - 1) for step in expected)
  return "survived" if np.isfinite(worst) and worst < _RTOL else f"losses {worst:.1e} apart"
