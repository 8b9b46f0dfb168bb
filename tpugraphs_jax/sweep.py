r"""A sweep: runs of one or several configs, for every point of a grid and every seed.

  python -m tpugraphs_jax.sweep --config=configs/tile.py:recommended \
      --grid=optimizer.learning_rate:1e-3,3e-3 --seeds=3 --out=out/rates
  python -m tpugraphs_jax.sweep --config=layout.py:xla-random,full \
      --config=layout.py:xla-random,gst_ed --seeds=3 --out=out/segments

Each run is a process of `run_tile.py` or `run_layout.py`, with a working folder below `--out`.
The same command again continues interrupted runs and skips finished ones. `runs.csv` has a row per
run, `report.html` compares them, and the last lines name the config with the largest Kendall tau.
Flags of Apache Beam after `--` run the sweep on a cluster:
`-- --runner=FlinkRunner --flink_master=HOST:8081`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import datetime
import itertools
import os
from pathlib import Path
import re
import shlex
import subprocess
import sys
from typing import Any

from tpugraphs_jax import report
from tpugraphs_jax.infra import console, files, tasks, trust
from tpugraphs_jax.report.runs import comparisons, read_all
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import evaluation, results

_DONE = ("last epoch", "early stopping")  # `summary.json`: training was not interrupted
# A value of a grid, with its commas in brackets and quotes.
_VALUE = r"""(?:[^,'"(\[]|'[^']*'|"[^"]*"|\([^()]*\)|\[[^\[\]]*\])+"""
# With it jax also keeps programs that it compiles in less than a second. They are in the cache of
# the user: the folder of a sweep may come from somebody else, and programs in it would run.
_KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
_SETTINGS = "sweep.json"
_ROWS = "runs.csv"
_LOG = "log.txt"
_HEAD = "--- "  # begins the first line of each process in `log.txt`


@dataclasses.dataclass(frozen=True)
class SweepRun:
  """One run.

  Attributes:
    name: its folder below `out`.
    out: folder of the sweep.
    command: without `--workdir` and `--resume`.
    point: fields of the grid with their values; of a sweep with several configs also `config`.
    seed: of the run.
  """

  name: str
  out: str
  command: tuple[str, ...]
  point: tuple[tuple[str, str], ...]
  seed: int

  @property
  def folder(self) -> Path:
    return Path(self.out) / self.name

  @property
  def summary(self) -> dict[str, Any]:
    """The content of `summary.json`; empty without one."""
    return results.read_summary(self.folder)

  @property
  def is_done(self) -> bool:
    """Whether training ended without an interruption, and was evaluated."""
    summary = self.summary
    ended = str(summary.get("training", {}).get("ended", ""))
    return ended.startswith(_DONE) and bool(results.final_evaluation(summary))


def grid_of(texts: Iterable[str]) -> dict[str, list[str]]:
  """Values by field, from texts `FIELD:VALUE,VALUE`.

  Commas in brackets and quotes belong to a value: `model.pooling:('mean',),('max','mean')`.

  Raises:
    ValueError: a text of another form, or a field twice.
  """
  grid: dict[str, list[str]] = {}
  for text in texts:
    field, colon, rest = text.partition(":")
    if not field or not colon or not re.fullmatch(f"{_VALUE}(,{_VALUE})*", rest):
      raise ValueError(
        f"--grid={text}, expected FIELD:VALUE,VALUE such as optimizer.learning_rate:1e-3,3e-3"
      )
    if field in grid:
      raise ValueError(f"--grid names {field} twice: give all of its values in one --grid")
    grid[field] = re.findall(_VALUE, rest)
  return grid


def runs_of(
  commands: Mapping[str, Sequence[str]], out: str, grid: dict[str, list[str]], seeds: Sequence[int]
) -> list[SweepRun]:
  """The runs of a sweep: every config at every point of the grid with every seed.

  Args:
    commands: the command of each value of `--config`.
    out: folder of the sweep.
    grid: values by field.
    seeds: of each point.
  """
  names, variants = _short_names(grid, "."), _short_names(commands, ":")
  runs = []
  for config, *values in itertools.product(commands, *grid.values()):
    point = tuple(zip(grid, values))
    parts = [f"{names[field]}={value}" for field, value in point]
    flags = tuple(f"--config.{field}={value}" for field, value in point)
    if len(commands) > 1:
      parts, point = [variants[config], *parts], (("config", config), *point)
    folder = ",".join(re.sub(r"[^\w.,+=-]+", "_", part) for part in parts) or "base"
    for seed in seeds:
      command = (*commands[config], *flags, f"--config.seed={seed}")
      runs.append(SweepRun(f"{folder}/seed_{seed}", out, command, point, seed))
  if len({run.name for run in runs}) < len(runs):
    raise ValueError(
      "two configs or points of --grid have the same name: give values that differ in letters, "
      "digits, '.', '+' or '-'"
    )
  return runs


def _short_names(texts: Iterable[str], separator: str) -> dict[str, str]:
  """The last part of each text; the whole text where two texts have the same last part."""
  last = {text: text.rpartition(separator)[2] for text in texts}
  parts = list(last.values())
  return {text: part if parts.count(part) == 1 else text for text, part in last.items()}


def do(run: SweepRun) -> None:
  """Begins or continues a run; its output is appended to `log.txt` in its folder."""
  if run.is_done:
    return
  files.check_way(Path(run.out), run.folder)
  run.folder.mkdir(parents=True, exist_ok=True)
  is_begun = (run.folder / "checkpoints").exists()
  console.say(f"{run.name}: {'goes on' if is_begun else 'begins'}")
  command = [*run.command, f"--workdir={run.folder}", *["--resume"] * is_begun]
  env = _KEEP_ALL | tasks.python_environment() | {tasks.PARENT: str(os.getpid())}
  with files.open_plain(run.folder / _LOG, "ab") as log:
    date = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    log.write(f"{_HEAD}{date} {shlex.join(run.command)}\n".encode())
    log.flush()
    process = None
    try:
      with tasks.signals_wait():
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
      process.wait()
    except (KeyboardInterrupt, SystemExit) as error:
      if process is not None:
        if isinstance(error, SystemExit):  # Ctrl-C reaches the run by itself
          process.terminate()
        process.wait()  # the run saves a checkpoint
      raise
  console.say(f"{run.name}: {_state(run)}")


def _state(run: SweepRun) -> str:
  """`done`, `not begun`, or the last complaint of a run."""
  log = run.folder / _LOG
  return "done" if run.is_done else _complaint(log) if log.exists() else "not begun"


def _complaint(path: Path) -> str:
  """The last line of the last process that begins with `error: `, else the last line."""
  *_, output = path.read_bytes().decode(errors="replace").rpartition(f"\n{_HEAD}")
  lines = output.splitlines()[1:] or ["no output"]
  return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])


def row_of(run: SweepRun) -> dict[str, Any]:
  """The row of a run in `runs.csv`."""
  summary = run.summary
  training = summary.get("training", {})
  return {
    "run": run.name,
    **dict(run.point),
    "seed": run.seed,
    "state": _state(run),
    "step": training.get("step", ""),
    "seconds": training.get("seconds", ""),
    **results.final_evaluation(summary).get("metrics", {}),
  }


def _write_rows(runs: Sequence[SweepRun], out: str) -> None:
  rows = [row_of(run) for run in runs]
  empty = dict.fromkeys((name for row in rows for name in row), "")
  evaluation.write_csv(Path(out) / _ROWS, [empty | row for row in rows])


def _check_settings(out: str, settings: dict[str, Any]) -> None:
  """Writes the settings of a new sweep; refuses (ValueError) a folder with other settings."""
  path = Path(out) / _SETTINGS
  if path.exists():
    with trust.json_of(path, {}, "remove it, or give another --out") as earlier:
      changed = next((name for name in settings if earlier.get(name) != settings[name]), None)
    if changed is not None:
      raise ValueError(
        f"{path} is of a sweep with {changed} {earlier.get(changed)}, now it is "
        f"{settings[changed]}: give the same, or another --out"
      )
    return
  files.write_json(path, settings, indent=2)


def _command_of(args: argparse.Namespace, value: str) -> list[str]:
  """The command of all runs of a value of `--config` with the flags that they have in common.

  Raises:
    ValueError, FileNotFoundError: there is no such config.
  """
  if not value.partition(":")[0].endswith(".py"):
    raise ValueError(f"--config={value}, expected FILE.py:VARIANT such as tile.py:recommended")
  place = configs.resolve(value)
  kind = configs.load(place).kind
  start = (
    "import signal, sys; from tpugraphs_jax import run; from tpugraphs_jax.infra import tasks; "
    f"tasks.end_with_parent(signal.SIGTERM); sys.argv[0] = 'run_{kind}.py'; run.{kind}()"
  )
  data = [f"--data_root={args.data_root}"] * bool(args.data_root)
  data += ["--synthetic"] * args.synthetic
  return tasks.python_command("-c", start, f"--config={place}", *data, *args.fields)


def _check_configs(runs: Iterable[SweepRun]) -> None:
  """Refuses (ValueError) configs that cannot work with any data."""
  for run in runs:
    if run.seed:
      continue  # as with seed 0
    place, *fields = (word for word in run.command if word.startswith("--config"))
    try:
      configs.with_flags(place.removeprefix("--config="), ["", *fields])
    except ValueError as error:
      raise ValueError(f"{run.name.rpartition('/')[0]}: {error}") from error


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  flags, beam = tasks.split_flags(argv)
  parser = console.parser("sweep", __doc__, allow_abbrev=False)
  parser.add_argument(
    "--config",
    action="append",
    required=True,
    help="FILE.py:VARIANT, as in the commands; several --config run all of them",
  )
  parser.add_argument(
    "--grid",
    action="append",
    default=[],
    metavar="FIELD:VALUE,...",
    help="values of a field; several --grid make all combinations",
  )
  parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0 (default: 1)")
  parser.add_argument("--out", required=True, help="folder of all runs, which a cluster shares")
  parser.add_argument("--data_root", default="", help="as in the commands")
  parser.add_argument("--synthetic", action="store_true", help="as in the commands")
  parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
  args, rest = parser.parse_known_args(flags)
  wrong = next((arg for arg in rest if not arg.startswith("--config.") or "=" not in arg), None)
  if wrong is not None:
    parser.error(
      f"unknown argument {wrong}; fields are --config.FIELD=VALUE, and Beam's own flags "
      "come after --"
    )
  if len({os.path.realpath(configs.resolve(value)) for value in args.config}) < len(args.config):
    parser.error("the same --config twice: give each once, and --seeds for several runs of it")
  for name in ("seeds", "jobs"):
    if getattr(args, name) < 1:
      parser.error(f"--{name}={getattr(args, name)}, expected at least 1")
  if any(text.startswith("seed:") for text in args.grid) or any(
    field.startswith("--config.seed=") for field in rest
  ):
    parser.error("seeds are 0, 1, ... up to --seeds: leave out --grid=seed and --config.seed")
  files.refuse(args.out, "--out")
  args.fields, args.beam, args.out = rest, beam, str(files.expanded(args.out))
  return args


@console.command(keeps="finished runs are kept: run the same command again")
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; 0 where every run is done."""
  args = _parse(sys.argv[1:] if argv is None else argv)
  grid = grid_of(args.grid)
  commands = {value: _command_of(args, value) for value in args.config}
  runs = runs_of(commands, args.out, grid, range(args.seeds))
  _check_configs(runs)
  settings = {"config": " ".join(args.config), "fields": sorted(args.fields)}
  settings |= {"data_root": args.data_root, "synthetic": args.synthetic}
  _check_settings(args.out, settings)
  todo = [run for run in runs if not run.is_done]
  console.say(f"{len(runs)} runs, of which {len(runs) - len(todo)} are done")
  with tasks.stopping(), console.working("training", total=len(todo), unit="runs") as work:
    finished = lambda _: work.update()
    tasks.run(do, todo, processes=args.jobs, beam=args.beam, finished=finished)
  return _conclude(runs, args.out)


def _conclude(runs: Sequence[SweepRun], out: str) -> int:
  """Writes the rows and the report; 0 where every run is done."""
  _write_rows(runs, out)
  done = [run for run in runs if run.is_done]
  console.say(f"{len(done)} of {len(runs)} runs are done: {Path(out) / _ROWS}")
  if done:
    folders = [run.folder for run in done]
    for comparison in comparisons(read_all(folders)):
      console.say("\n".join(comparison.verdict))
    report.try_write(folders, Path(out) / report.FILE)
  return 0 if len(done) == len(runs) else 1


if __name__ == "__main__":
  sys.exit(main())
