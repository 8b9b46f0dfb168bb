"""Labels the programs of `data/own` anew for a TPU, with the time of every kernel.

    nice -n 15 python -m tools.label_own --target v6e --out out/own

Draws as many choices of a program as the collections of TPU v3 have (`outputs`, `blocks` and
`kept_out`), by the same seed, and writes collections such as `outputs_v6e` into `OUT/npz`: the test
families first, then those of validation and training, small programs first. Then come programs
without labels of TPU v3, in `more_v6e`: more drawn ones, and the steps of `benchmarks/steps`, those
of a file in one split. It takes hours. Run it in the repository, and repeat the command to resume.
With another version of jax, libtpu or the simulator it starts anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import sys

import jax

from tools import search_prior
from tpugraphs_jax.data import npz
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning import label_file, labels, programs, workers
from tpugraphs_jax.tuning.workers import LabelRequest

_COLLECTIONS = ("outputs", "blocks", "kept_out")
_SPLITS = ("test", "valid", "train")
_MORE = "more"  # the collection of programs without labels of TPU v3
_FILES = {"examples/programs/generated_more.py": "train"} | {
  f"benchmarks/steps/{name}.py": split
  for split, names in {
    "train": ("algebra", "indices", "science", "vision"),
    "valid": ("sequences",),
    "test": ("graphs", "serving", "transformers"),
  }.items()
  for name in names
}
_CONFIGS = 8  # choices of each of them
_OTHER_SPLIT = ("vision_mobilenet", "vision_convnext")  # depthwise convolutions, as test families


def requests(target: str, out: str, splits: Sequence[str] = _SPLITS) -> list[LabelRequest]:
  """The programs of a target in their order.

  Args:
    target: a TPU generation such as `v6e`.
    out: folder of the new data.
    splits: to label, in this order.
  """
  suffix = "" if target == "v3" else f"_{target}"
  found = []
  for place, split in enumerate(splits):
    for path in search_prior.files(_COLLECTIONS, (split,)):
      record = label_file.collected(path)
      _, opcode, _ = npz.read_structure(path, "layout")
      request = LabelRequest(
        record["source"],
        record["name"],
        split,
        record["collection"] + suffix,
        out,
        labels.TpuEstimate.name,
        target,
        record["configs_asked"],
        record["seed"],
        record["operands"],
      )
      found.append((place, len(opcode), request))
  return [request for *_, request in sorted(found, key=lambda each: each[:2])]


def more_requests(target: str, out: str, splits: Sequence[str] = _SPLITS) -> list[LabelRequest]:
  """The programs of `_MORE`, by file; arguments as of `requests`."""
  suffix = "" if target == "v3" else f"_{target}"
  return [
    LabelRequest(
      program.source,
      program.name,
      split,
      f"layout:own:{_MORE}{suffix}",
      out,
      labels.TpuEstimate.name,
      target,
      _CONFIGS,
      seed=0,
    )
    for file, split in _FILES.items()
    if split in splits
    for program in programs.load(file)
    if program.name not in _OTHER_SPLIT
  ]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--target", required=True, help="such as v6e")
  parser.add_argument("--out", required=True, help="folder of the new data")
  parser.add_argument("--splits", nargs="+", default=_SPLITS, choices=_SPLITS)
  parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")  # else jax looks for a TPU where libtpu is
  asked = [
    request
    for listed in (requests, more_requests)
    for request in listed(args.target, args.out, args.splits)
  ]
  failures = workers.run(asked, processes=args.jobs)
  for line in failures:
    print(f"failed: {console.one_line(line)}", file=sys.stderr)
  return int(bool(failures))


if __name__ == "__main__":
  sys.exit(main())
