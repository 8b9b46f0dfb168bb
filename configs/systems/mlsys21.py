"""The kernel model of "A Learned Performance Model for TPUs" (MLSys 2021).

Expected: see docs/records/race.md, and docs/records/synthetic.md for `mlsys21_per_node`. The length
of the published runs is not known. Here `train.epochs` sets the length of a run.

  python run_tile.py --config=configs/tile.py:preset=mlsys21 --workdir=out/mlsys21
  python run_tile.py --config=configs/tile.py:preset=mlsys21_fusion --workdir=out/mlsys21_fusion
"""

from typing import Any

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(op_embed_dim=8, width=8, rounds=1)  # variant `ci`


def mlsys21(config: ConfigDict) -> None:
  """SAGE of "A Learned Performance Model for TPUs" (MLSys 2021): sums, means and maxima of nodes.

  A step has ten slates of ten tiles. The loss is the rank loss with a hinge. Adam is as in Keras,
  because the paper's models were written in TensorFlow. Learning rate and clipping are guesses.
  """
  _common(config)


def mlsys21_per_node(config: ConfigDict) -> None:
  """mlsys21 with a score per node."""
  _common(config, reduction="per_node")


def mlsys21_lstm(config: ConfigDict) -> None:
  """mlsys21 with an LSTM over nodes in topological order."""
  _common(config, reduction="lstm")


def mlsys21_transformer(config: ConfigDict) -> None:
  """mlsys21 with a transformer over nodes."""
  _common(config, reduction="transformer")


def mlsys21_gat(config: ConfigDict) -> None:
  """mlsys21 with graph attention."""
  _common(config, convolution="attention")


def mlsys21_work(config: ConfigDict) -> None:
  """mlsys21 with estimates of a kernel's work."""
  _common(config)
  _with_work(config)


def mlsys21_fusion(config: ConfigDict) -> None:
  """mlsys21 with the error of log runtimes.

  Targets are absolute runtimes in milliseconds, corrected for the drift of the machine
  (`TileConfigs.unit_ns`).
  """
  _common(config)
  config.batch.target = "absolute"
  config.loss.losses = "LogMSE:1"


def mlsys21_fusion_work(config: ConfigDict) -> None:
  """mlsys21 with the error of log runtimes and estimates of a kernel's work."""
  mlsys21_fusion(config)
  _with_work(config)


def _common(config: ConfigDict, **options: Any) -> None:
  config.data.update(feature_transform="minmax", config_transform="minmax")
  config.batch.update(graphs=10, configs=10, target="official")
  config.model = base.model("tile", "MLSys21", **options)
  config.loss.losses = "RankHingeLoss:1"
  config.optimizer.update(name="adam", eps=1e-7, clip_norm=1.0)


def _with_work(config: ConfigDict) -> None:
  config.data.update(
    features=("released", "kernel_work"), feature_transform="kernel_work=signed_log1p,*=minmax"
  )


LAYOUTS = {}
TILES = {
  settings.__name__: settings
  for settings in (
    mlsys21,
    mlsys21_per_node,
    mlsys21_lstm,
    mlsys21_transformer,
    mlsys21_gat,
    mlsys21_work,
    mlsys21_fusion,
    mlsys21_fusion_work,
  )
}
