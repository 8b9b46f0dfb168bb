"""`python -m tpugraphs_jax.data.synthetic --out DIR --scale tiny --seed 0`."""

from __future__ import annotations

from absl import app
from absl import flags

from tpugraphs_jax import graph
from tpugraphs_jax.data.synthetic import scales
from tpugraphs_jax.data.synthetic.generate import generate

_OUT = flags.DEFINE_string("out", None, "Folder to write into.", required=True)
_SCALE = flags.DEFINE_enum("scale", "tiny", scales.SCALES, "Number and size of the graphs.")
_SEED = flags.DEFINE_integer("seed", 0, "Everything follows from it.", lower_bound=0)
_COLLECTIONS = flags.DEFINE_multi_enum(
    "collections", list(graph.COLLECTIONS), graph.COLLECTIONS,
    "Which collections; may be given several times.")
_DEFECTS = flags.DEFINE_bool("defects", False, "With the defects of the released data.")
_LIMIT = flags.DEFINE_integer("limit", None, "Files per split at most.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", None, "Processes.", lower_bound=1)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  try:
    data_root = generate(
        _OUT.value, scale=_SCALE.value, seed=_SEED.value, collections=_COLLECTIONS.value,
        defects=_DEFECTS.value, limit=_LIMIT.value, workers=_WORKERS.value)
  except ValueError as error:
    raise SystemExit(f"error: {error}") from error
  paths = list(data_root.rglob("*.npz"))
  size = sum(path.stat().st_size for path in paths)
  print(f"{len(paths)} files, {size / 1e6:.1f} MB; use --data_root={data_root}\n"
        f"noise-free runtimes: {data_root.parent / 'ceiling'}")


if __name__ == "__main__":
  app.run(main)
