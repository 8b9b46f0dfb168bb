"""The command `python -m tpugraphs_jax.estimate`.

    python -m tpugraphs_jax.estimate FILE.py:NAME --targets v5e v6e:2x4

It estimates the programs of a file, compares them with a file of estimates or with a profile, and
makes one table of many variants of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys

import jax

from tpugraphs_jax.hlo import calls, topology, tpu
from tpugraphs_jax.infra import console, tasks
from tpugraphs_jax.tuning import (
  comparison,
  compiler,
  estimate,
  page,
  profile,
  programs,
  summary,
  variants,
)

# How the files begin that the command writes.
_OUTPUTS = {"save": b"{", "html": b"<!doctype html>", "trace": b"{"}


@console.command(name="estimate")
def main(argv: Sequence[str] | None = None) -> int:
  """Prints what each program of a source costs.

  Returns:
    0; 1 where a program got slower than the one that it is compared with; 2 where the command was
    used wrongly.
  """
  parser = console.parser("estimate", "Estimates what functions cost on TPUs, without a TPU.")
  parser.add_argument(
    "source",
    nargs="?",
    help="FILE.py:KEY, FILE.py with a dictionary PROGRAMS, or a folder of such files",
  )
  parser.add_argument(
    "--targets",
    nargs="+",
    help=f"default: {' '.join(estimate.TARGETS)}, or those of the file of --against",
  )
  parser.add_argument("--save", type=Path, help="a file for the estimates, such as a.json")
  parser.add_argument("--against", type=Path, help="such a file: compares with its estimates")
  parser.add_argument(
    "--slower",
    type=float,
    help="part by which a program may be slower than in the file of --against, .02 is 2 %%, before "
    "the command ends with status 1; default: 0",
  )
  parser.add_argument(
    "--profile",
    type=Path,
    metavar="DIR",
    help="a profile of a TPU, or XProf's HLO Op Stats: prints its times beside estimates of the "
    "source, or of the HLO modules in the profile",
  )
  parser.add_argument("--html", type=Path, help="a page with the pictures of the result")
  parser.add_argument("--trace", type=Path, help="a timeline in JSON, which Perfetto opens")
  parser.add_argument(
    "--variants",
    type=Path,
    metavar="RESULTS",
    help="one table of all programs of the source on one target, the cheapest that fits first; the "
    "file keeps their results, and a second call goes on from it",
  )
  parser.add_argument(
    "--processes", type=int, help="variants at a time; default: as cores and memory allow"
  )
  parser.add_argument(
    "--timeout", type=float, default=compiler.TIMEOUT, help="seconds for one compilation"
  )
  parser.add_argument(
    "--memory",
    action="store_true",
    help="says what fits, without times, which take most of the work",
  )
  flags, beam = tasks.split_flags(sys.argv[1:] if argv is None else argv)
  args = parser.parse_args(flags)
  console.check_seconds("--timeout", args.timeout)
  comparison.check_slower(args.slower or 0.0)
  if args.slower is not None and not args.against:
    raise ValueError("--slower is a part by which --against may fail: name a file with --against")
  for flag, begin in _OUTPUTS.items():
    if path := getattr(args, flag):
      _check_output(f"--{flag}", path, begin)
  if args.targets:
    args.targets = [name for target in args.targets for name in filter(None, target.split(","))]
  if args.profile:
    if args.save or args.against or args.trace or args.variants:
      raise ValueError("--profile takes a source, --targets, --timeout and --html alone")
    return _beside_profile(args.profile, args.source, args.targets, args.timeout, args.html)
  if args.source is None:
    raise ValueError("there is no source: name FILE.py:KEY, or a profile with --profile")
  if args.variants:
    return _variants(args, beam)
  before = summary.load(args.against) if args.against else []
  if args.against and not before:
    raise ValueError(f"{args.against} has no programs to compare with")
  rows = before[0].rows if before else ()
  targets = args.targets or [row.target for row in rows] or estimate.TARGETS
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  estimates = []
  asked = programs.load(args.source)
  if before:
    _check_comparable(before, [program.name for program in asked], targets)
  for program in asked:
    call = calls.Call(program.function, program.args, program.kwargs)
    try:
      estimated = estimate.estimate_call(
        call, targets, timeout=args.timeout, memory_only=args.memory
      )
    except estimate.Interrupted as error:
      print(f"{dataclasses.replace(error.estimate, name=program.name)}\n", flush=True)
      raise
    estimates.append(dataclasses.replace(estimated, name=program.name))
    print(f"{estimates[-1]}\n", flush=True)
  if args.save:
    summary.save(estimates, args.save)
  compared = None
  if args.against:
    compared = comparison.compare(before, estimates, slower=args.slower or 0.0)
    print(compared)
  if args.html:
    (compared or page.together(estimates)).save_html(args.html)
  if args.trace:
    page.together(estimates).save_trace(args.trace)
  for path in filter(None, (args.save, args.html, args.trace)):
    console.say(f"{path}: written")
  return int(compared is not None and compared.is_slower)


def _check_output(flag: str, path: Path, begin: bytes) -> None:
  """Refuses a file before the work for it: one of another kind is not replaced.

  Raises:
    ValueError, OSError: it holds something else, or its folder is missing.
  """
  if path.is_dir():
    raise IsADirectoryError(f"{flag} is {path}, a folder: name a file")
  if path.is_file():
    with path.open("rb") as file:
      found = file.read(len(begin))
    if found and found.lower() != begin:
      raise ValueError(f"{flag} is {path}, a file of another kind: name a new one")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{flag} is {path}, and there is no folder {path.parent}")


def _check_comparable(
  before: Sequence[summary.Estimate], asked: Sequence[str], targets: Sequence[str]
) -> None:
  """Refuses (ValueError) a comparison without a program and target of both sides, before the work.

  Args:
    before: estimates of a file.
    asked: names of the programs to estimate.
    targets: for which.
  """
  matched = (comparison.counterpart(before, name, len(asked)) for name in asked)
  known = {row.target for one in matched if one for row in one.rows}
  is_slice = any("-" in target for target in targets)  # `v6e-8` is v6e:2x4, as libtpu knows
  if not is_slice and not known & {tpu.short_name(target) for target in targets}:
    describe = ", ".join(
      f"{one.name} for {' '.join(row.target for row in one.rows)}" for one in before
    )
    raise ValueError(
      f"nothing to compare: the file has {describe}, and asked is {', '.join(asked)} for "
      f"{' '.join(targets)}: estimate the same programs for the same targets"
    )


def _variants(args: argparse.Namespace, beam: Sequence[str] | None) -> int:
  """Prints the variants of a step as one table."""
  if args.targets is None or len(args.targets) != 1:
    raise ValueError(f"--targets is {args.targets}, and variants are compared on one target")
  if args.processes is not None and args.processes < 1:
    raise ValueError(f"--processes is {args.processes}, expected at least 1")
  if args.save or args.against or args.trace:
    raise ValueError("--variants keeps its results itself: leave --save, --against, --trace out")
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  target = topology.full_name(args.targets[0])
  compared = variants.compare(
    args.source,
    target,
    args.variants,
    timeout=args.timeout,
    memory_only=args.memory,
    processes=args.processes,
    beam=beam,
  )
  print(compared)
  if args.html:
    compared.save_html(args.html)
  return 0


def _beside_profile(
  path: Path, source: str | None, targets: Sequence[str] | None, timeout: float, html: Path | None
) -> int:
  """Prints the times of a profile beside estimates, and writes their page.

  Raises:
    ValueError: there are several targets or programs, or as `profile.compare`.
  """
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  found = programs.load(source) if source else []
  for name, several in (("--targets", targets), ("the source", found)):
    if several and len(several) > 1:
      raise ValueError(f"{name} has {len(several)} values, and a profile is compared with one")
  call = calls.Call(found[0].function, found[0].args, found[0].kwargs) if found else None
  one = lambda call, target: estimate.estimate_call(call, [target], timeout=timeout).rows[0]
  compared = profile.compare(path, one, call=call, target=targets[0] if targets else "")
  print("\n\n".join(map(str, compared)))
  if html:
    page.together(compared).save_html(html)
  return 0
