"""Weights of the official TensorFlow baseline as a model file of this project.

    python -m tpugraphs_jax.run.official --config=tile.py:EarlyJoinSAGE --weights=weights.npz \\
        --data_root=~/data/tpugraphs/npz --out=out/official

`weights.npz` holds the arrays of Keras' `model.weights` in their order, as TensorFlow's side
writes them:

    np.savez("weights.npz", *[w.numpy() for w in model.weights])

The minima and maxima that scale features are those of the training split, which the
official code computes anew as well. The folder `--out` then evaluates and ranks like one
that was trained in.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import re
import sys

import numpy as np

from tpugraphs_jax import remote
from tpugraphs_jax.data import npz
from tpugraphs_jax.rankers import official_weights as official
from tpugraphs_jax.run import configs
from tpugraphs_jax.run.job import Job, trainable
from tpugraphs_jax.serve import ranker as ranker_lib
from tpugraphs_jax.train import log, state


def read_weights(path: Path) -> list[np.ndarray]:
  """The arrays of an `.npz`, `[...]` each, in the order of the numbers in their names.

  Raises:
    FileNotFoundError: there is no such file.
    NpzError: it is no `.npz` of arrays.
  """
  if not path.is_file():
    raise FileNotFoundError(f"{path} is missing: --weights must name the arrays of Keras' "
                            "model.weights, saved by np.savez")
  with npz.NpzArchive(path) as archive:
    arrays = {name: archive.read(name) for name in archive.names}
  number = lambda name: [int(part) for part in re.findall(r"\d+", name)[:1]]
  return [arrays[name] for name in sorted(arrays, key=lambda name: (number(name), name))]


def convert(job: Job, weights: list[np.ndarray], data_root: str, out: Path) -> None:
  """Writes `model.npz` into `out`, from arrays `[...]` in the order of Keras' weights.

  Raises:
    ValueError: the weights are not those of the config's model and this data.
  """
  graphs = trainable(job, job.data.load(data_root, "train"))
  job.fit(graphs)
  params = official.params_from_official(job.ranker.family.network, weights)
  if differ := state.first_difference(params, job.ranker.param_shapes(graphs[0])):
    name, given, expected = differ
    raise ValueError(f"the weights have {given} for {name}, the model on this data has {expected}: "
                     "give the config (widths, number of layers) and the training split that the "
                     "weights belong to")
  about = {"step": 0, "origin": "weights of the official TensorFlow baseline",
           "versions": log.versions()}
  job.ranker.save(out / ranker_lib.MODEL_FILE, params, about)


def main(argv: list[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m tpugraphs_jax.run.official", description=__doc__.splitlines()[0])
  parser.add_argument("--config", required=True, help="such as tile.py:EarlyJoinSAGE")
  parser.add_argument("--weights", required=True, type=Path, help="arrays of model.weights, .npz")
  parser.add_argument("--data_root", required=True, help="folder with tile/ and layout/")
  parser.add_argument("--out", required=True, help="folder for the model")
  args = parser.parse_args(argv)
  config = None
  try:
    remote.refuse(args.out, "--out")
    out = Path(args.out).expanduser()
    config = configs.load(args.config)
    with config.unlocked():
      config.data_root = args.data_root
    job = Job.of(config)
    convert(job, read_weights(args.weights.expanduser()), args.data_root, out)
  except (ValueError, OSError) as error:
    print(f"error: {configs.as_flags(configs.one_line(error), config)}", file=sys.stderr)
    return 2
  print(f"wrote {out / ranker_lib.MODEL_FILE}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
