"""`python -m tpugraphs_jax.hlo show FILE`."""

from __future__ import annotations

from collections.abc import Sequence
import sys

from tpugraphs_jax.hlo import module_graph, proto, sources
from tpugraphs_jax.infra import console


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = console.parser("hlo", "Shows HLO modules as graphs.")
  parser.add_argument("command", choices=["show"], help="a summary of every module")
  parser.add_argument("file", help="a module as bytes or text, or tuning data")
  loaded = sources.load_file(parser.parse_args(argv).file)
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
