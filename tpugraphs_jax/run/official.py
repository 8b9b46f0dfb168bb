r"""Converts weights of the official TensorFlow baseline to a model of this project.

    python -m tpugraphs_jax.run.official --config=tile.py:EarlyJoinSAGE --weights=model_HASH \
        --data_root=~/data/tpugraphs/npz --out=out/official

The command writes a model into `--out`, which evaluates and ranks like a working folder. It reads
the folder of a SavedModel, as the official tile trainer writes it, or an `.npz` file with the
arrays of Keras' `trainable_variables` in their order. Neither needs TensorFlow. TensorFlow writes
the `.npz` file by

    np.savez("weights.npz", *[w.numpy() for w in model.trainable_variables])

The first array is the table of opcode embeddings. It has `num_ops` rows, the largest opcode in the
data plus 1, and the model refuses graphs with larger opcodes. Features are scaled by minima and
maxima over the training split, without kernels of fewer than `batch.min_configs` configurations, as
in the official trainer. No file of weights has them: `--data_root` must hold the training split on
which the weights were trained.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
import contextlib
from pathlib import Path
import re
import sys

import numpy as np

from tpugraphs_jax.data import npz
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.rankers import model_file, official_weights, tensor_bundle
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log
from tpugraphs_jax.train.loading import data_of, fit, trainable


def read_weights(path: Path) -> list[np.ndarray]:
  """Weights `[...]` in the order of Keras: the variables of a SavedModel, or arrays of an `.npz`.

  Args:
    path: the folder of a SavedModel, or an `.npz` whose names have the numbers of the weights.

  Raises:
    FileNotFoundError: there is no such file or folder.
    ValueError: the file is damaged, or holds something else.
  """
  if path.is_dir():
    return tensor_bundle.read(path)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path} is missing: --weights must name a SavedModel, or the arrays of Keras' "
      "model.trainable_variables, saved by np.savez"
    )
  with npz.NpzArchive(path) as archive:
    arrays = {name: archive.read(name) for name in archive.names}
  number = lambda name: [int(part) for part in re.findall(r"\d+", name)[:1]]
  return [arrays[name] for name in sorted(arrays, key=lambda name: (number(name), name))]


def convert(config: Config, weights: list[np.ndarray], out: Path) -> int:
  """Writes `model.npz` into `out`, from arrays `[...]` in the order of Keras' weights.

  Args:
    config: of the model; `config.data_root` is the folder of the data.
    weights: the table of opcode embeddings `[num_ops, op_embed_dim]`, then all other weights.
    out: a folder.

  Returns:
    The number of training graphs over which minima and maxima were taken.

  Raises:
    FileNotFoundError: there is no training split.
    ValueError: the weights do not fit the model of the config on this data.
  """
  # Refuses weights of another model before the data is read.
  official_weights.params_from_official(Ranker(config).family.network, weights)
  config = config.replace(model__opcodes=np.atleast_1d(weights[0]).shape[0])
  ranker, (data, *_) = Ranker(config), data_of(config)
  graphs = data.load("train")
  graphs = trainable(data, graphs, min_configs=config.batch.min_configs)
  fit(ranker, [data], graphs)
  params = official_weights.params_from_official(ranker.family.network, weights)
  if difference := model_file.first_difference(params, ranker.param_shapes(graphs[0])):
    name, weight, expected = difference
    raise ValueError(
      f"the weights have {weight} for {name}, the model on this data has {expected}: give the "
      "config (widths, number of layers) and the training split of the weights"
    )
  origin = "weights of the official TensorFlow baseline"
  about = {"step": 0, "origin": origin, "versions": log.versions()}
  ranker.save(out / model_file.MODEL_FILE, params, about)
  return len(graphs)


def _parser() -> argparse.ArgumentParser:
  parser = console.parser("run.official", __doc__.splitlines()[0])
  parser.add_argument("--config", required=True, help="such as tile.py:EarlyJoinSAGE")
  parser.add_argument(
    "--set",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    dest="changes",
    help="changes a field of --config, such as model.hidden_dim=128",
  )
  parser.add_argument("--out", required=True, help="folder for the model")
  parser.add_argument(
    "--weights",
    required=True,
    type=Path,
    help="SavedModel; or arrays of model.trainable_variables, .npz",
  )
  parser.add_argument("--data_root", required=True, help="folder with tile/ and layout/")
  return parser


def _config_of(args: argparse.Namespace) -> Config:
  """The config of `--config` with the changes of `--set`."""
  config = configs.load(args.config)
  for change in args.changes:
    field, equals, text = change.partition("=")
    if not equals:
      raise ValueError(
        f"--set={change}: expected a field of the config and its value, such as "
        "model.hidden_dim=128"
      )
    value = text
    with contextlib.suppress(ValueError, SyntaxError):  # a string without quotes
      value = ast.literal_eval(text)
    try:
      config = config.replace(**{field: value})
    except ValueError as error:
      raise ValueError(f"--set={change}: {configs.one_line(error)}") from None
  return config.replace(data_root=args.data_root)


@console.command
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  args = _parser().parse_args(argv)
  files.refuse(args.out, "--out")
  out = files.expanded(args.out)
  graphs = convert(_config_of(args), read_weights(files.expanded(args.weights)), out)
  print(f"minima and maxima of features: over {graphs:,} training graphs in {args.data_root}")
  print(console.printable(f"wrote {out / model_file.MODEL_FILE}"))
  return 0


if __name__ == "__main__":
  sys.exit(main())
