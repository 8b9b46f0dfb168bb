"""The official TensorFlow baseline of TpuGraphs, with its published settings.

docs/parity.md compares the two implementations. Expected top-5 slowdown of kernels (mean over
validation kernels) on the synthetic `medium` data: 0.040 in 3 minutes on one CPU core. Expected
Kendall tau of programs for xla-random, xla-default, nlp-random and nlp-default: 0.20, 0.52, 0.39
and 0.34 in 2 to 4 minutes.

  python run_tile.py --config=configs/tile.py:LateJoinSAGE --workdir=out/late
  python run_layout.py --config=configs/layout.py:nlp-default,official --workdir=out/official
"""

import functools

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  EvalOptions,
  LayoutDataOptions,
  LayoutEvalOptions,
  LossOptions,
  Model,
  Optimizer,
  TileDataOptions,
  TrainOptions,
)


def programs(collection: str) -> Config:
  """ResModel with the published settings."""
  return Config(
    data=LayoutDataOptions.of(
      collection, feature_transform="minmax", config_transform="minmax", skip_constant=False
    ),
    batch=BatchOptions(
      graphs=8,
      configs=16,
      min_configs=16,
      sampling="skewed",
      target="official",
      drop_remainder=False,
    ),
    model=Model("ResModel"),
    loss=LossOptions("ListMLELoss:1", kernel_l2=1e-4, activity_l2=1e-4),
    optimizer=Optimizer("adam", learning_rate=1e-3, clip_norm_per_variable=1e-2),
    train=TrainOptions(epochs=50, early_stop_epochs=25, best_metric="opa", valid_sampling="slates"),
    eval=LayoutEvalOptions(configs=500),
  )


def kernels(collection: str, *, model: str) -> Config:
  """Official model of kernels, published settings.

  Kernels with fewer than 10 configurations are left out of training.
  """
  return Config(
    data=TileDataOptions.of(
      collection, feature_transform="minmax", config_transform="minmax", loader_threads=0
    ),
    batch=BatchOptions(graphs=10, configs=10, min_configs=10, target="official"),
    model=Model(model),
    loss=LossOptions("ListMLELoss:1,MSE:0.02", temperature=10.0, kernel_l2=1e-4, activity_l2=1e-4),
    optimizer=Optimizer("adam", learning_rate=1e-3, clip_norm_per_variable=1e-3),
    train=TrainOptions(
      epochs=100,
      early_stop_epochs=20,
      best_metric="opa",
      valid_sampling="slates",
      valid_configs=256,
      log_every_steps=100,
    ),
    eval=EvalOptions(graphs=8, configs=64),
  )


KERNELS = ("EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN", "MLP")
LAYOUTS = {"official": programs}
TILES = {name: functools.partial(kernels, model=name) for name in KERNELS}
