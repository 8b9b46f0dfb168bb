"""Tile rankers for fused kernels.

After the colon stand at most one ranker, one collection `own-NAME` and `ci`, separated by commas
(`VARIANTS`). The default and the other models of the official baseline have its published
settings (configs/systems/official.py). All other rankers except `preset=third` also train on
kernels with fewer than 10 configurations.

Expected top-5 slowdown of `recommended` (mean over validation kernels) on the synthetic `medium`
data: 0.001 in 3 minutes on one CPU core.

  python run_tile.py --config=configs/tile.py:recommended --workdir=out/recommended
  python run_tile.py --config=configs/tile.py --config.optimizer.learning_rate=0.01 ...
"""

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
from tpugraphs_jax.run import variants


def recommended(collection: str) -> Config:
  """EarlyJoinSAGE with features of tile counts, best settings found.

  Log features, ListMLE on larger slates, averaged parameters.
  """
  return Config(
    data=TileDataOptions.of(
      collection,
      feature_transform="signed_log1p",
      config_transform="signed_log1p",
      config_features=("released", "tile_counts"),
      loader_threads=0,
    ),
    batch=BatchOptions(
      graphs=10,  # in a step, over all devices
      configs=16,  # of each kernel
      target="official",
    ),
    model=Model("EarlyJoinSAGE"),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer(
      "adam",
      learning_rate=2e-3,
      schedule="cosine",
      warmup_fraction=0.05,
      clip_norm=1.0,
      average_decay=0.99,
    ),
    train=TrainOptions(epochs=30, eval_every_epochs=3, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


RANKERS = {"recommended": recommended} | variants.systems("tile")
VARIANTS = variants.described({}, RANKERS)


def get_config(variant: str = "EarlyJoinSAGE") -> Config:
  """The config of a ranker, a collection and `ci`: see `VARIANTS`."""
  collection, ranker, ci = variants.parse(variant, file="tile.py", collections=(), rankers=RANKERS)
  config = RANKERS[ranker or "EarlyJoinSAGE"](collection or "xla")
  return variants.small(config) if ci else config
