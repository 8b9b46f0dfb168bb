"""`python -m tpugraphs_jax.hlo convert IN.pb... --out DIR`, and `show FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import sys

from tpugraphs_jax.hlo import module_graph, proto, sources, tuning_data
from tpugraphs_jax.infra import console, files


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; 0 where all went well, 1 where some inputs failed, 2 where it was refused."""
  args = _parser().parse_args(argv)
  try:
    status = args.command(args)
    sys.stdout.flush()
    return status
  except BrokenPipeError:  # the reader of the output, such as `head`, has ended
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
  parser = console.parser("hlo", "Converts tuning data, and shows HLO modules.")
  commands = parser.add_subparsers(required=True)
  convert_parser = commands.add_parser(
    "convert", help="the data set's tuning protobufs to .npz in the released format"
  )
  convert_parser.set_defaults(command=_convert)
  convert_parser.add_argument("files", nargs="+", metavar="IN.pb")
  convert_parser.add_argument("--out", required=True, help="folder for the .npz files")
  convert_parser.add_argument("--jobs", type=int, help="processes; one per processor if not given")
  show_parser = commands.add_parser("show", help="a summary of an HLO module")
  show_parser.set_defaults(command=_show)
  show_parser.add_argument("file", help="module, tuning data or text")
  return parser


def _convert(args: argparse.Namespace) -> int:
  files.refuse(args.out, "--out")
  if args.jobs is not None and args.jobs < 1:
    raise ValueError(f"--jobs={args.jobs}, expected at least 1")
  result = tuning_data.convert(args.files, args.out, processes=args.jobs)
  for line in result.skipped:
    print(f"skipped: {console.one_line(line)}")
  for line in result.failed:
    print(f"failed: {console.one_line(line)}", file=sys.stderr)
  said = (
    f"{len(result.written)} files written to {args.out}, {len(result.skipped)} modules "
    f"skipped, {len(result.failed)} inputs failed"
  )
  print(console.printable(said))
  return 1 if result.failed else 0


def _show(args: argparse.Namespace) -> int:
  loaded = sources.load_file(args.file)
  message = proto.parse_any(loaded.data, where=loaded.where)
  entries = getattr(message, "modules", [message])  # only TuningData has several
  for entry in entries:
    module = entry if isinstance(entry, proto.HloModuleProto) else entry.module
    where, name = loaded.where, module.name or loaded.name
    graph = module_graph.featurize_module(module, where=where, name=name, edge_order="insertion")
    print(console.printable(graph.summary()), end="\n\n")
  return 0


if __name__ == "__main__":
  sys.exit(main())
