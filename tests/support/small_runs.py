"""Runs of both commands on tiny data, run once for all test files that ask for them.

The process that asks first runs them; the others wait for it.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import os
from pathlib import Path
import pickle
import tempfile
from typing import NamedTuple

from tests.support import commands, recorded
from tpugraphs_jax import synthetic

COMMANDS = {
  "tile": ("run_tile.py", "configs/tile.py:ci"),
  "layout": ("run_layout.py", "configs/layout.py:xla-random,full,ci"),
}
COLLECTIONS = {"tile": "tile:xla", "layout": "layout:xla:random"}
SMALL = (
  "--config.model.hidden_dim=8",
  "--config.train.epochs=3",
  "--config.train.log_every_steps=3",
  "--config.optimizer.learning_rate=0.03",
)
STOPPED_AT = 6  # in the middle of the second epoch of four steps


class SmallRuns(NamedTuple):
  """The folders and ends of all runs."""

  folder: Path
  data_root: Path
  ended: dict[str, commands.Ended]  # by name of the run

  def workdir(self, name: str) -> Path:
    return self.folder / name


@functools.cache
def all_runs() -> SmallRuns:
  """Does all runs, or reads the result of the test process that has run them."""
  shared = Path(os.environ["TPUGRAPHS_TESTS_SHARED"])
  with (shared / "runs.lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    kept = shared / "runs.pickle"
    if not kept.exists():
      kept.write_bytes(pickle.dumps(_run_all(Path(tempfile.mkdtemp(dir=shared)))))
    return pickle.loads(kept.read_bytes())


def _run_all(folder: Path) -> SmallRuns:
  """Does tile and layout runs side by side."""
  data_root = synthetic.generate(
    folder / "synthetic", collections=COLLECTIONS.values(), progress=False
  )

  def work(kind: str) -> dict[str, commands.Ended]:
    runs = _runs(kind, folder, data_root)
    if recorded.NPZ.exists():
      runs |= _real_runs(kind, folder)
    home = folder / f"home_{kind}"
    home.mkdir()
    return dict(zip(runs, commands.run_all(list(runs.values()), home=home)))

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    tile, layout = pool.map(work, COMMANDS)
  return SmallRuns(folder, data_root, tile | layout)


def _runs(kind: str, folder: Path, data_root: Path) -> dict[str, commands.Run]:
  script, config = COMMANDS[kind]
  command = [script, f"--config={config}", *SMALL]

  def run(name, *flags, **options):
    places = f"--data_root={data_root}", f"--workdir={folder / name}"
    return commands.Run([*command, *places, *flags], **options)

  runs = {f"{kind}_whole": run(f"{kind}_whole", page=True)}
  if kind == "tile":
    runs["tile_stopped"] = run("tile_stopped", stop_at_step=STOPPED_AT)
    runs["tile_resumed"] = run("tile_stopped", "--resume")
    no_data = f"--workdir={folder / 'tile_no_data'}"
    runs["tile_two_devices"] = run("tile_two_devices", devices=2)
    runs["tile_no_data"] = commands.Run([*command, no_data, "--synthetic"])
    runs["tile_later"] = commands.Run(
      [script, "--do=evaluate", no_data, "--config.eval.configs=16"]
    )
  return runs


def _real_runs(kind: str, folder: Path) -> dict[str, commands.Run]:
  name, script = f"{kind}_real", COMMANDS[kind][0]
  config = ["--config=configs/tile.py", "--config.model.num_gnns=1", "--config.train.epochs=2"]
  if kind == "layout":
    config = [
      "--config=configs/layout.py:xla-default,full,ci",
      f"--config.data.store_dir={folder / 'store'}",
      "--config.eval.max_configs=100",
    ]
  return {
    name: commands.Run(
      [script, *config, f"--data_root={recorded.NPZ}", f"--workdir={folder / name}"]
    )
  }
