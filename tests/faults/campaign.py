"""Tries faults of every kind and prints what survived.

    python tests/faults/campaign.py --points 1000 --inputs 1000000 --out table.md

Takes hours in its long form; `test_faults.py` is the short one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import concurrent.futures
import datetime
import os
from pathlib import Path
import shutil
import sys
import tempfile

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np

import commands
import damage
import devices
import disk
import folders
import inputs
import kills
import limits
import load
import network
from table import Row, markdown
from tpugraphs_jax.data import npz, synthetic
from tpugraphs_jax.train import report

_COLLECTIONS = ("tile:xla", "layout:xla:random")
_POINTS_AT_A_TIME = 5
_MODULE = commands.ROOT / "tests" / "data" / "hlo" / "fuzz06.hlo.pb"
_PARTS = ("store", "kill", "damage", "input", "disk", "network", "numbers",
          "load", "commands", "devices", "folders")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--points", type=int, default=20, help="kills of each mode, and 10 times of store builders")
  parser.add_argument("--modes", nargs="*", default=kills.MODES, choices=kills.MODES)
  parser.add_argument("--parts", nargs="*", default=_PARTS, choices=_PARTS)
  parser.add_argument("--damages", type=int, default=1, help="per file and kind")
  parser.add_argument("--inputs", type=int, default=1000, help="mutations of each input")
  parser.add_argument("--disks", type=int, default=6, help="sizes of full disks")
  parser.add_argument("--downloads", type=int, default=3, help="of each fault of a network")
  parser.add_argument("--short", action="store_true", help="a few numbers and loads")
  parser.add_argument("--workers", type=int, default=2, help="modes side by side")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=Path, help="file for the table; brought up to date meanwhile")
  return parser.parse_args(argv)


def _kill_rows(args: argparse.Namespace, folder: Path, data_root: Path) -> Iterator[list[Row]]:
  """The rows of all modes, again and again as points are added."""
  def prepare(mode: str) -> kills.Kills:
    return kills.Kills(mode, folder, data_root)

  def extend(job: tuple[int, kills.Kills]) -> None:
    number, killed = job
    rng = np.random.default_rng([args.seed, number, killed.row.tried])
    killed.try_points(min(_POINTS_AT_A_TIME, args.points - killed.row.tried), rng)

  with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
    modes = list(pool.map(prepare, args.modes))
    while any(killed.row.tried < args.points for killed in modes):
      list(pool.map(extend, enumerate(modes)))
      yield [killed.row for killed in modes]


def _separate_rows(args: argparse.Namespace, folder: Path, data_root: Path) -> Iterator[Row]:
  """The rows of parts that need no run before them."""
  if "network" in args.parts:
    yield from network.rows(folder, times=args.downloads, rng=np.random.default_rng(args.seed))
  if "numbers" in args.parts:
    home = folder / "numbers" / "home"
    home.mkdir(parents=True)
    few = dict(tasks=("tile",), cases=limits.SHORT) if args.short else {}
    yield from limits.rows(folder / "numbers", data_root, home=home, **few)
  if "devices" in args.parts:
    home = folder / "devices" / "home"
    home.mkdir(parents=True)
    few = dict(tasks=("tile",), pairs=devices.SHORT) if args.short else {}
    yield from devices.rows(folder / "devices", data_root, home=home, **few)
  if "commands" in args.parts:
    for killed in (kills.collecting(folder / "collect"),
                   kills.sweeping(folder / "sweep", data_root)):
      killed.try_points(args.points, np.random.default_rng(args.seed))
      yield killed.row
  if "load" in args.parts:
    few = dict(cases=load.SHORT) if args.short else {}
    yield from load.rows(folder / "load", full=not args.short, **few)


def _trained(folder: Path, data_root: Path) -> tuple[list[str], Path, Path]:
  """A layout command without its working folder, the folder of its run, and its home."""
  home, whole = folder / "home", folder / "workdir"
  home.mkdir(parents=True)
  command = ["run_layout.py", "--config=configs/layout.py:xla-random,ci", *kills.SMALL,
             f"--data_root={data_root}", f"--config.data.store_dir={folder / 'store'}"]
  (ended,) = commands.run_all([commands.Run([*command, f"--workdir={whole}"])], home=home)
  assert ended.code == 0, ended.err
  return command, whole, home


def _other_rows(args: argparse.Namespace, folder: Path, data_root: Path) -> Iterator[Row]:
  rng = np.random.default_rng([args.seed, 1])
  command, whole, home = _trained(folder, data_root)
  tile, layout = (npz.split_files(data_root, name, "train")[0] for name in _COLLECTIONS)
  if "damage" in args.parts:
    graph = next((folder / "store").rglob("meta.json")).parent
    copy = shutil.copytree(whole, folder / "damaged")
    yield from damage.rows(copy, graph, times=args.damages, rng=rng)
  if "input" in args.parts:
    sources = inputs.readers(tile, layout, whole / "results.csv", whole / "model.npz", _MODULE)
    yield from inputs.rows(sources, folder, times=args.inputs, rng=rng)
  if "disk" in args.parts:
    needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    sizes = np.linspace(8, needed, args.disks + 1)[:-1].astype(int).tolist()
    yield from disk.rows(command, whole, folder, sizes, home=home)
  if "folders" in args.parts:
    plain = [part for part in command if not part.startswith(("--data_root", "--config.data.store"))]
    few = dict(vanished=folders.SHORT, read_only=()) if args.short else {}
    yield from folders.rows(plain, whole, folder / "folders", data_root, home=home, **few)


def main(argv: list[str] | None = None) -> int:
  """Runs the campaign; returns how many faults had another end than they should."""
  args, rows = _arguments(argv), []
  folder = Path(tempfile.mkdtemp(prefix="faults"))
  data_root = synthetic.generate(folder / "data", collections=_COLLECTIONS, progress=False)

  def show(rows: list[Row]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions().items())
    text = f"{datetime.date.today()}, {versions}\n\n{markdown(rows)}"
    print(text, flush=True)
    if args.out:
      args.out.write_text(text)

  try:
    if "store" in args.parts:  # before jax has threads: builders are forks
      killed = kills.StoreKills(folder, data_root)
      killed.try_points(10 * args.points, np.random.default_rng(args.seed))
      rows.append(killed.row)
      show(rows)
    for row in _separate_rows(args, folder, data_root):
      rows.append(row)
      show(rows)
    if set(args.parts) & {"damage", "input", "disk", "folders"}:
      for row in _other_rows(args, folder / "other", data_root):
        rows.append(row)
        show(rows)
    if "kill" in args.parts:
      for killed in _kill_rows(args, folder, data_root):
        show(rows + killed)
      rows += killed
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  return sum(len(row.failures) for row in rows)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  sys.exit(min(main(), 100))
