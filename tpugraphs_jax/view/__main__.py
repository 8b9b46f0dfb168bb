"""Shows a program in a browser: a graph file, an HLO module, or layouts that `tune` chose.

python -m tpugraphs_jax.view program.npz --config 3 --against 0 --model layout-v3-estimate
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
import sys

from tpugraphs_jax import hlo, view
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.tuning import layouts


def read(path: Path) -> OpGraph | layouts.TunedProgram:
  """The program in a file, by its content.

  Raises:
    ValueError: the file holds no program.
    FileNotFoundError: there is no such file.
  """
  files.check_file(path, "an .npz, an HLO module, or layouts that Tuned.save wrote")
  with path.open("rb") as file:
    start = file.read(4).lstrip()
  if start.startswith(b"{"):
    return layouts.read(path)
  if not start.startswith(b"PK"):
    graph = hlo.featurize(path, edge_order="insertion")
    if not graph.num_nodes:
      raise ValueError(f"{path} holds no instruction, expected an HLO module or its text")
    return graph
  with npz.NpzArchive(path) as archive:
    is_layout = "node_config_feat" in archive.names
  return npz.read_layout(path) if is_layout else npz.read_tile(path)


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = console.parser("view", __doc__)
  parser.add_argument("file", type=Path, help=".npz, serialized HLO, HLO text, or saved layouts")
  parser.add_argument("--config", type=int, help="number of a configuration, with its layouts")
  parser.add_argument("--against", type=int, help="number of another one, beside it")
  parser.add_argument("--model", help="also costs of layouts: a folder, a model file or a name")
  parser.add_argument("--table", action="store_true", help="text instead of the picture")
  parser.add_argument("--port", type=int, default=0, help="a free one if not given")
  parser.add_argument("--no_browser", action="store_true", help="print the address only")
  args = parser.parse_args(argv)
  server = {"port": args.port, "browser": not args.no_browser, "as_table": args.table}
  program = read(files.expanded(args.file))
  with console.explaining_devices():
    view.show(program, args.config, against=args.against, model=args.model, **server)
  return 0


if __name__ == "__main__":
  sys.exit(main())
