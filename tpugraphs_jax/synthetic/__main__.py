"""`python -m tpugraphs_jax.synthetic --out DIR --scale tiny --seed 0`."""

from __future__ import annotations

from collections.abc import Sequence
import sys

from tpugraphs_jax import datasets
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.synthetic import generate, SCALES


@console.command(keeps="finished files are kept: run the same command again")
def main(argv: Sequence[str] | None = None) -> int:
  """Writes the collections that the arguments name; returns the exit status."""
  parser = console.parser("synthetic", "Writes synthetic collections in the released form.")
  parser.add_argument("--out", required=True, help="folder to write into")
  parser.add_argument(
    "--scale", default="tiny", choices=SCALES, help="number and size of the graphs"
  )
  parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
  parser.add_argument(
    "--collections",
    nargs="+",
    default=datasets.RELEASED,
    choices=datasets.RELEASED,
    metavar="COLLECTION",
    help=f"some of {', '.join(datasets.RELEASED)}",
  )
  parser.add_argument("--limit", type=int, help="files per split at most")
  parser.add_argument("--workers", type=int, help="processes")
  args = parser.parse_args(argv)
  for name, least in (("seed", 0), ("limit", 1), ("workers", 1)):
    value = getattr(args, name)
    if value is not None and value < least:
      parser.error(f"--{name} is {value}, expected at least {least}")
  files.refuse(args.out, "--out")
  data_root = generate(**vars(args))
  paths = files.visible(data_root, "**/*.npz")
  size = sum(path.stat().st_size for path in paths)
  print(
    f"{len(paths)} files, {size / 1e6:.1f} MB; use --data_root={data_root}\n"
    f"noise-free runtimes: {data_root.parent / 'ceiling'}"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
