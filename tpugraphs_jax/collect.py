r"""Collections of your programs: their choices of layouts, and labels of choices.

  layouts = collect.choices(step, *arguments)           # groups of operations, with options
  other = collect.apply(step, layouts.choice(numbers))  # the function with layouts chosen

The command labels many choices of many programs:

  python -m tpugraphs_jax.collect --programs examples/programs --label tpu_estimate \
      --target v3 --configs 48 --out out/own --collection layout:own:programs

It writes `OUT/npz/layout/own/NAME/SPLIT/PROGRAM.npz` in the released format, and every label at
once into `PROGRAM.jsonl` beside it, so that a killed run can go on. A finished program is not
labelled again. With `--tiles` in place of `--programs` it labels the tiles of Pallas kernels:

  python -m tpugraphs_jax.collect --tiles examples/tiles.py --label tpu_estimate --target v6e \
      --configs 20 --out out/own --collection tile:own:kernels

With `--` and flags of Apache Beam, such as `-- --runner=FlinkRunner`, a cluster labels the
programs. Every machine then needs their files and the folder OUT.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import resource
import sys

import jax

from tpugraphs_jax import datasets, graph
from tpugraphs_jax.infra import console, files, tasks
from tpugraphs_jax.tuning import labels, measure, programs, tile_collection, workers
from tpugraphs_jax.tuning.choosing import apply, Choice, Choices, choices
from tpugraphs_jax.tuning.workers import LabelRequest

__all__ = ["Choice", "Choices", "apply", "choices", "measure"]

_SECONDS_MEASURED = 86400.0


@console.command(keeps="labels that are made are kept: run the same command again")
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; 0 where every program was collected, 1 where some failed, 2 if refused."""
  args = _parse(sys.argv[1:] if argv is None else argv)
  if args.tiles:
    return _collect_tiles(args)
  requests = _requests(args)
  known = workers.labelled(requests)
  failures = workers.run(requests, processes=args.jobs, progress=not args.quiet, beam=args.beam)
  for line in failures:
    print(f"failed: {console.one_line(line)}", file=sys.stderr)
  said = (
    f"{len(requests) - len(failures)} of {len(requests)} programs collected in "
    f"{args.out} as {args.collection}{_rate(workers.labelled(requests) - known)}"
  )
  print(console.printable(said))
  return 1 if failures else 0


def _collect_tiles(args: argparse.Namespace) -> int:
  """Labels the tiles of kernels; 1 where some failed."""
  _check(args, "tile")
  if args.label != labels.TpuEstimate.name:
    raise ValueError(f"--label={args.label}, expected {labels.TpuEstimate.name} of tiles")
  if args.operands or args.beam is not None:
    raise ValueError("--operands and flags of Beam are for --programs: leave them out")
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  kernels = [
    kernel for source in args.tiles for kernel in programs.load_tiles(source, split=args.split)
  ]
  failures = tile_collection.collect(
    kernels,
    out=args.out,
    collection=args.collection,
    target=args.target,
    configs=args.configs,
    seed=args.seed,
    progress=not args.quiet,
  )
  for line in failures:
    print(f"failed: {console.one_line(line)}", file=sys.stderr)
  done = len(kernels) - len(failures)
  said = f"tiles of {done} of {len(kernels)} kernels are in {args.out} as {args.collection}"
  print(console.printable(said))
  return int(bool(failures))


def _rate(made: int) -> str:
  """Labels per hour of processor time of this machine's workers, as text; empty without any."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  hours = (used.ru_utime + used.ru_stime) / 3600
  return f"; {made:,} labels, {made / hours:,.0f} an hour and core" if made and hours else ""


def _requests(args: argparse.Namespace) -> list[LabelRequest]:
  """One request per program, in the order given.

  Raises:
    ValueError, FileNotFoundError: an option is wrong, as `programs.load`, or two
      programs have one name.
  """
  _check(args, "layout")
  if args.label == labels.Measured.name and args.beam is not None:
    raise ValueError(
      "--label=measured measures one program after the other on this machine: "
      "leave out -- and what follows it"
    )
  if args.jobs < 1:
    raise ValueError(f"--jobs={args.jobs}, expected at least 1")
  if args.timeout is None:
    args.timeout = _SECONDS_MEASURED if args.label == labels.Measured.name else LabelRequest.timeout
  console.check_seconds("--timeout", args.timeout)
  if args.label != labels.Measured.name:
    jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  labels.create(args.label, target=args.target, seed=args.seed)
  loaded = [
    program for source in args.programs for program in programs.load(source, split=args.split)
  ]
  if not loaded:
    raise ValueError(
      f"--programs {' '.join(args.programs)} has no program, expected FILE.py with "
      "a dictionary PROGRAMS, or a folder of such files"
    )
  names = [program.name for program in loaded]
  if repeated := {name for name in names if names.count(name) > 1}:
    raise ValueError(
      f"{len(repeated)} names of programs are used twice, such as "
      f"{min(repeated)}; rename the file or the key"
    )
  fields = ("collection", "out", "label", "target", "configs", "seed", "operands", "timeout")
  shared = {name: getattr(args, name) for name in fields}
  return [LabelRequest(program.source, program.name, program.split, **shared) for program in loaded]


def _check(args: argparse.Namespace, kind: str) -> None:
  """Refuses (ValueError) a folder, collection or number that is none of this kind."""
  files.refuse(args.out, "--out")
  collection = datasets.Collection(args.collection)
  if collection.kind != kind or collection.is_released:
    raise ValueError(f"--collection={args.collection}, expected {kind}:own:NAME")
  if args.configs < 2:
    raise ValueError(f"--configs={args.configs}, expected at least 2")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  flags, beam = tasks.split_flags(argv)
  parser = console.parser(
    "collect",
    "Labels layout choices of programs and writes them as a data set.",
    epilog="-- and flags of Apache Beam, such as --runner=FlinkRunner: a cluster labels them",
  )
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument(
    "--programs",
    nargs="+",
    metavar="SOURCE",
    help="FILE.py with a dictionary PROGRAMS, a folder of them, or FILE.py:KEY",
  )
  what.add_argument(
    "--tiles",
    nargs="+",
    metavar="SOURCE",
    help="FILE.py with a dictionary TILES of Pallas kernels, or FILE.py:KEY",
  )
  parser.add_argument("--label", required=True, help="tpu_estimate, bytes_estimate or measured")
  parser.add_argument("--target", help="of tpu_estimate: v2, v3, v4, v5e, v5p, v6e or 7x")
  parser.add_argument("--configs", type=int, default=64, help="per program (default: 64)")
  parser.add_argument(
    "--operands",
    action="store_true",
    help="choose the orders of operands too (default: of outputs alone)",
  )
  parser.add_argument("--out", required=True, help="folder of the data")
  parser.add_argument("--collection", required=True, help="layout:own:NAME, or tile:own:NAME")
  parser.add_argument(
    "--split", choices=graph.SPLITS, help="of all programs (default: what their file says in SPLIT)"
  )
  parser.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")
  parser.add_argument(
    "--jobs",
    type=int,
    default=os.cpu_count() or 1,
    help="processes (default: one per processor; always one for measured and for --tiles)",
  )
  parser.add_argument(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="a worker that labels nothing for so long is ended, and its choice or "
    f"program counts as failed (default: {LabelRequest.timeout:g}; {_SECONDS_MEASURED:g} "
    "for measured, which labels all choices of a program at its end)",
  )
  parser.add_argument("--quiet", action="store_true", help="no progress bar")
  args = parser.parse_args(flags, argparse.Namespace(beam=beam))
  if args.label == labels.Measured.name:
    args.jobs = 1  # programs at the same time would disturb each other
  return args


if __name__ == "__main__":
  tasks.exit_at_once(main, sys.argv[1:])
