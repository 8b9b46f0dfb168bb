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

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base
from tpugraphs_jax.configs.base import RankerSettings
from tpugraphs_jax.configs.systems import official

_DEFAULT = "EarlyJoinSAGE"
_SMALL = dict(op_embed_dim=8, hidden_dim=16, num_gnns=1)  # for `ci`


def recommended(config: ConfigDict) -> None:
  """EarlyJoinSAGE with features of tile counts, best settings found.

  Log features, ListMLE on larger slates, averaged parameters.
  """
  config.data.update(
    feature_transform="signed_log1p",
    config_transform="signed_log1p",
    config_features=("released", "tile_counts"),
  )
  config.batch.update(configs=16, min_configs=2)
  config.model = base.model("tile", "EarlyJoinSAGE")
  config.loss.update(losses="ListMLELoss:1", temperature=1.0, kernel_l2=0.0, activity_l2=0.0)
  config.optimizer.update(
    learning_rate=2e-3,
    clip_norm_per_variable=0.0,
    clip_norm=1.0,
    schedule="cosine",
    warmup_fraction=0.05,
    average_decay=0.99,
  )
  config.train.update(epochs=30, early_stop_epochs=0, eval_every_epochs=3, valid_sampling="fixed")


RANKERS = {
  name: RankerSettings(change, _SMALL)
  for name, change in {**official.KERNELS, "recommended": recommended}.items()
} | base.presets("tile")
VARIANTS = base.variants({}, RANKERS)


def get_config(variant: str = _DEFAULT) -> ConfigDict:
  """The config of a ranker, a collection and `ci`: see `VARIANTS`."""
  collection, ranker, ci = base.arguments(variant, file="tile.py", collections=(), rankers=RANKERS)
  config = base.defaults("tile", collection or "xla")

  # Data.
  config.data.feature_transform = "minmax"
  config.data.config_transform = "minmax"
  config.data.loader_threads = 0

  # Slates.
  config.batch.graphs = 10  # in a step, over all devices
  config.batch.configs = 10  # of each kernel
  config.batch.min_configs = 10  # smaller kernels are left out
  config.batch.target = "official"

  # Loss.
  config.loss.losses = "ListMLELoss:1,MSE:0.02"
  config.loss.temperature = 10.0
  config.loss.kernel_l2 = config.loss.activity_l2 = 1e-4

  # Optimizer.
  config.optimizer.name = "adam"
  config.optimizer.learning_rate = 1e-3
  config.optimizer.schedule = "constant"
  config.optimizer.clip_norm_per_variable = 1e-3

  # Length, and the choice of the checkpoint.
  config.train.epochs = 100
  config.train.early_stop_epochs = 20
  config.train.valid_sampling = "slates"
  config.train.valid_configs = 256
  config.train.log_every_steps = 100

  # Scoring.
  config.eval.graphs = 8
  config.eval.configs = 64

  # Model, and what its ranker changes.
  settings = RANKERS[ranker or _DEFAULT]
  settings.apply(config, ci=ci)
  if ci and not settings.is_published:
    config.batch.update(graphs=10, configs=6, slates_per_epoch=40, min_configs=2)
    config.train.update(epochs=5, valid_sampling="fixed", valid_configs=256)
  return config
