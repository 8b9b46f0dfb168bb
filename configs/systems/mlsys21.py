"""The kernel model of "A Learned Performance Model for TPUs" (MLSys 2021).

Expected: see docs/records/race.md, and docs/records/synthetic.md for `mlsys21_per_node`. The length
of the published runs is not known. Here `train.epochs` sets the length of a run.

  python run_tile.py --config=configs/tile.py:preset=mlsys21 --workdir=out/mlsys21
  python run_tile.py --config=configs/tile.py:preset=mlsys21_fusion --workdir=out/mlsys21_fusion
"""

from typing import Any

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  EvalOptions,
  LossOptions,
  Model,
  Optimizer,
  TileDataOptions,
  TrainOptions,
)


def mlsys21(collection: str, **options: Any) -> Config:
  """SAGE of "A Learned Performance Model for TPUs" (MLSys 2021): sums, means and maxima of nodes.

  A step has ten slates of ten tiles. The loss is the rank loss with a hinge. Adam is as in Keras,
  because the paper's models were written in TensorFlow. Learning rate and clipping are guesses.
  """
  return Config(
    data=TileDataOptions.of(
      collection, feature_transform="minmax", config_transform="minmax", loader_threads=0
    ),
    batch=BatchOptions(graphs=10, configs=10, target="official"),
    model=Model("MLSys21", **options),
    loss=LossOptions("PairwiseHingeLoss:1", pair_reduction="pairs"),
    optimizer=Optimizer("adam", learning_rate=1e-3, eps=1e-7, clip_norm=1.0),
    train=TrainOptions(epochs=100, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


def mlsys21_per_node(collection: str) -> Config:
  """mlsys21 with a score per node."""
  return mlsys21(collection, reduction="per_node")


def mlsys21_lstm(collection: str) -> Config:
  """mlsys21 with an LSTM over nodes in topological order."""
  return mlsys21(collection, reduction="lstm")


def mlsys21_transformer(collection: str) -> Config:
  """mlsys21 with a transformer over nodes."""
  return mlsys21(collection, reduction="transformer")


def mlsys21_gat(collection: str) -> Config:
  """mlsys21 with graph attention."""
  return mlsys21(collection, convolution="attention")


def mlsys21_work(collection: str) -> Config:
  """mlsys21 with estimates of a kernel's work."""
  return mlsys21(collection).replace(**_WORK)


def mlsys21_fusion(collection: str) -> Config:
  """mlsys21 with the error of log runtimes.

  Targets are absolute runtimes in milliseconds, corrected for the drift of the machine
  (`TileConfigs.unit_ns`).
  """
  return mlsys21(collection).replace(batch__target="absolute", loss__losses="LogMSE:1")


def mlsys21_fusion_work(collection: str) -> Config:
  """mlsys21 with the error of log runtimes and estimates of a kernel's work."""
  return mlsys21_fusion(collection).replace(**_WORK)


_WORK: dict[str, Any] = {
  "data.features": ("released", "kernel_work"),
  "data.feature_transform": "kernel_work=signed_log1p,*=minmax",
}
TILES = {
  f"preset={config.__name__}": config
  for config in (
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
