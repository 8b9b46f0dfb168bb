"""The 3rd place of the competition "Fast or Slow?" (jafluri/kaggle_tpu_graph).

Expected: see docs/records/race.md. The published runs took five epochs, each with every
configuration once, on several GPUs. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=third --workdir=out/third
  python run_tile.py --config=configs/tile.py:preset=third --workdir=out/third
"""

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  EvalOptions,
  LayoutDataOptions,
  LossOptions,
  Model,
  Optimizer,
  TileDataOptions,
  TrainOptions,
)


def third(collection: str) -> Config:
  """3rd place: linear attention beside SAGE in both directions, separate layers for positions.

  A step has four slates of 16 configurations. Every configuration comes once per pass over the
  programs, and an epoch may end within a pass. The loss is the sum of hinges over the pairs of a
  slate, averaged over slates. Adam has cosine decay to 1e-6.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection,
      features=("wide_logarithms", "operand_shapes", "tile_modulo", "random_walk"),
      feature_transform="operand_shapes=log_offset(3),*=none",
      virtual_node="output",
    ),
    batch=BatchOptions(
      graphs=4, configs=16, min_configs=16, graph_sampling="every_config", slates_per_epoch=1024
    ),
    model=Model("Third"),
    loss=LossOptions("PairwiseHingeLoss:1", pair_reduction="sum"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=1e-3,
      final_learning_rate=1e-6,
      schedule="cosine",
      eps=1e-8,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
  )


def tile_third(collection: str) -> Config:
  """3rd place, tiles: four SAGE layers with layer norm, the inverse logarithm of hinges.

  A step has 16 slates of 16 tiles. Every tile comes once per epoch; kernels with fewer than 16
  tiles are left out. Adam has cosine decay to 1e-6, without clipping.
  """
  return Config(
    data=TileDataOptions.of(
      collection,
      features=("wide_logarithms", "directed_walk"),
      virtual_node="output",
      loader_threads=0,
    ),
    batch=BatchOptions(
      graphs=16, configs=16, min_configs=16, graph_sampling="every_config", target="official"
    ),
    model=Model("Third"),
    loss=LossOptions("InverseLogHingeLoss:1"),
    optimizer=Optimizer(
      "adamw", learning_rate=1e-3, final_learning_rate=1e-6, schedule="cosine", eps=1e-8
    ),
    train=TrainOptions(epochs=100, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


LAYOUTS = {"preset=third": third}
TILES = {"preset=third": tile_third}
