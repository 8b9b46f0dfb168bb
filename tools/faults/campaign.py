"""Tries faults of every kind and prints a table of how the runs ended.

    python -m tools.faults.campaign --points 250 --inputs 170000 --kept rows.json --out table.md

This long form takes hours: 250 killed runs of each mode and a million inputs. With `--kept` a
stopped campaign can be continued. `test_faults.py` and `test_kills.py` run a short form.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import datetime
import functools
import itertools
import logging
import os
from pathlib import Path
import shutil
import sys
import tempfile

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests/support")]
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np

from tests.support import commands
from tools.faults import (
  damage,
  devices,
  disk,
  folders,
  foreign,
  hosts,
  inputs,
  kills,
  limits,
  load,
  network,
)
from tools.faults.table import Kept, markdown, Row
from tpugraphs_jax import synthetic
from tpugraphs_jax.data import npz
from tpugraphs_jax.train import log

_COLLECTIONS = ("tile:xla", "layout:xla:random")
_DISKS = 6  # sizes of full disks
_POINTS_AT_A_TIME, _STORES_AT_A_TIME, _INPUTS_AT_A_TIME = 5, 100, 2000
_PROTOBUFS = commands.ROOT / "tests" / "data" / "hlo"
_PARTS = (
  "store",
  "kill",
  "damage",
  "input",
  "disk",
  "network",
  "numbers",
  "load",
  "commands",
  "devices",
  "folders",
  "hosts",
  "sent",
)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--points", type=int, default=20, help="kills of each mode; store builders get 10 times as many"
  )
  parser.add_argument("--modes", nargs="*", default=kills.MODES, choices=kills.MODES)
  parser.add_argument("--parts", nargs="*", default=_PARTS, choices=_PARTS)
  parser.add_argument("--inputs", type=int, default=1000, help="mutations of each input")
  parser.add_argument("--sent", type=int, default=100, help="hostile files of each kind")
  parser.add_argument(
    "--downloads", type=int, default=3, help="downloads for each fault of a network"
  )
  parser.add_argument(
    "--short", action="store_true", help="fewer cases of numbers, devices, load, folders and hosts"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=Path, help="file for the table, rewritten after every row")
  parser.add_argument("--kept", type=Path, help="file for the rows, to continue a campaign")
  return parser.parse_args(argv)


def _extend(
  killed: kills.Kills | kills.StoreKills | kills.CommandKills,
  kept: Kept,
  points: int,
  seed: Sequence[int],
  *,
  at_a_time: int = _POINTS_AT_A_TIME,
) -> Iterator[Row]:
  """Kills until `points` kills have been tried, with those of earlier campaigns; yields the row."""
  killed.row = kept.row(killed.row.fault)
  while killed.row.tried < points:
    rng = np.random.default_rng([*seed, killed.row.tried])
    killed.try_points(min(at_a_time, points - killed.row.tried), rng)
    yield killed.row


def _kill_rows(
  args: argparse.Namespace, kept: Kept, folder: Path, data_root: Path
) -> Iterator[Row]:
  """Yields the row of each kind of run, each time that kills were added."""
  kinds: dict[str, Callable[[], kills.Kills | kills.CommandKills]] = {}
  if "commands" in args.parts:
    kinds |= {
      "collect": lambda: kills.collecting(folder / "collect"),
      "sweep": lambda: kills.sweeping(folder / "sweep", data_root),
    }
  if "kill" in args.parts:
    kinds |= {mode: functools.partial(kills.Kills, mode, folder, data_root) for mode in args.modes}
  for number, (mode, kind) in enumerate(kinds.items()):
    if kept.row(f"SIGKILL, {mode}").tried < args.points:
      yield from _extend(kind(), kept, args.points, (args.seed, number))


def _separate_rows(
  args: argparse.Namespace, kept: Kept, folder: Path, data_root: Path
) -> Iterator[Row]:
  """Yields the rows of the parts that need no finished run."""
  few = lambda **options: options if args.short else {}
  generator = lambda *more: np.random.default_rng([args.seed, *more])
  parts = {
    "network": lambda place: network.rows(place, times=args.downloads, rng=generator()),
    "numbers": lambda place: limits.rows(
      place, data_root, home=_home(place), **few(tasks=("tile",), cases=limits.SHORT)
    ),
    "devices": lambda place: devices.rows(
      place, data_root, home=_home(place), **few(tasks=("tile",), pairs=devices.SHORT)
    ),
    "load": lambda place: load.rows(place, full=not args.short, **few(cases=load.SHORT)),
    "hosts": lambda place: hosts.rows(
      place, data_root, times=1 if args.short else 2, rng=generator(2)
    ),
  }
  if "hosts" in args.parts and not hosts.are_possible():
    print("hosts: not tried, needs Linux, root and the program ip", flush=True)
    parts.pop("hosts")
  for name, rows in parts.items():
    if name in args.parts:
      yield from kept.once(name, functools.partial(rows, folder / name))


def _home(folder: Path) -> Path:
  home = folder / "home"
  home.mkdir(parents=True)
  return home


def _train(command: list[str], workdir: Path, home: Path) -> Path:
  """Runs a command in a working folder, and returns the folder."""
  (ended,) = commands.run_all([commands.Run([*command, f"--workdir={workdir}"])], home=home)
  assert ended.code == 0, ended.err
  return workdir


def _other_rows(
  args: argparse.Namespace, kept: Kept, folder: Path, data_root: Path
) -> Iterator[Row]:
  """Yields the rows of the parts that change files of a finished layout run."""
  home = _home(folder)
  command = [
    "run_layout.py",
    "--config=configs/layout.py:xla-random,full,ci",
    *kills.SMALL,
    f"--data_root={data_root}",
    f"--config.data.store_dir={folder / 'store'}",
  ]
  whole = _train(command, folder / "workdir", home)
  if "damage" in args.parts:
    yield from kept.once("damage", lambda: _damage(args, command, whole, folder, home))
  if "input" in args.parts:
    yield from _input_rows(args, kept, whole, folder, data_root)
  if "sent" in args.parts:
    (graph, *_) = npz.split_files(data_root, _COLLECTIONS[1], "valid")
    yield from kept.once(
      "sent", lambda: foreign.rows(whole, graph, folder / "sent", times=args.sent, seed=args.seed)
    )
  if "disk" in args.parts:
    yield from kept.once("disk", lambda: _disk(command, whole, folder, home))
  if "folders" in args.parts:
    plain = [
      part for part in command if not part.startswith(("--data_root", "--config.data.store"))
    ]
    few = dict(vanished=folders.SHORT, read_only=()) if args.short else {}
    yield from kept.once(
      "folders", lambda: folders.rows(plain, whole, folder / "folders", data_root, home=home, **few)
    )


def _damage(
  args: argparse.Namespace, command: list[str], whole: Path, folder: Path, home: Path
) -> Iterator[Row]:
  data_root = synthetic.generate(
    folder / "other_data", collections=_COLLECTIONS[1:], seed=args.seed + 1, progress=False
  )
  second = _train(
    [*command, f"--data_root={data_root}", f"--config.data.store_dir={folder / 'other_store'}"],
    folder / "other_run",
    home,
  )
  graph = next((folder / "store").rglob("meta.json")).parent
  copy = shutil.copytree(whole, folder / "damaged")
  return damage.rows(copy, second, graph, times=1, rng=np.random.default_rng([args.seed, 1]))


def _disk(command: list[str], whole: Path, folder: Path, home: Path) -> Iterator[Row]:
  needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
  sizes = np.linspace(8, needed, _DISKS + 1)[:-1].astype(int).tolist()
  return disk.rows(command, whole, folder, sizes, home=home)


def _input_rows(
  args: argparse.Namespace, kept: Kept, whole: Path, folder: Path, data_root: Path
) -> Iterator[Row]:
  """Yields the row of each kind of input, each time that more mutations were tried."""
  tile, layout = (npz.split_files(data_root, name, "train")[0] for name in _COLLECTIONS)
  for number, (name, source, read) in enumerate(
    inputs.readers(tile, layout, whole / "results.csv", whole / "model.npz", _PROTOBUFS)
  ):
    row = kept.row(f"input, {name}")
    while row.tried < args.inputs:
      inputs.try_reader(
        row,
        source,
        folder / f"mutated{source.suffix}",
        read,
        times=min(_INPUTS_AT_A_TIME, args.inputs - row.tried),
        rng=np.random.default_rng([args.seed, number, row.tried]),
      )
      yield row


def _all_rows(args: argparse.Namespace, kept: Kept, folder: Path) -> Iterator[Row]:
  """Runs all parts; yields the rows that are new or have changed."""
  data_root = synthetic.generate(folder / "data", collections=_COLLECTIONS, progress=False)
  if "store" in args.parts:  # before jax has threads: builders are forks
    yield from _extend(
      kills.StoreKills(folder, data_root),
      kept,
      10 * args.points,
      (args.seed,),
      at_a_time=_STORES_AT_A_TIME,
    )
  yield from _separate_rows(args, kept, folder, data_root)
  if set(args.parts) & {"damage", "input", "disk", "folders", "sent"}:
    yield from _other_rows(args, kept, folder / "other", data_root)
  yield from _kill_rows(args, kept, folder, data_root)


def main(argv: list[str] | None = None) -> int:
  """Runs the rest of a campaign; returns how many faults ended wrongly."""
  args = _arguments(argv)
  kept, folder = Kept(args.kept), Path(tempfile.mkdtemp(prefix="faults"))
  os.environ.setdefault(commands.COMPILED, str(folder / "compiled"))
  versions = ", ".join(f"{name} {version}" for name, version in log.versions().items())
  try:
    for row in itertools.chain(_all_rows(args, kept, folder), [None]):
      if row is not None:
        kept.add(row)
      text = f"{datetime.date.today()}, {versions}\n\n{markdown(kept.rows)}"
      print(text, flush=True)
      if args.out:
        args.out.write_text(text)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  return sum(len(row.failures) for row in kept.rows)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  logging.getLogger("absl").setLevel("ERROR")  # many mutated files cause warnings
  sys.exit(min(main(), 100))
