"""The 3rd place of the competition "Fast or Slow?" (jafluri/kaggle_tpu_graph).

Expected: see docs/records/race.md. The published runs took five epochs, each with every
configuration once, on several GPUs. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=third --workdir=out/third
  python run_tile.py --config=configs/tile.py:preset=third --workdir=out/third
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(  # variant `ci`
  op_embed_dim=8, first_width=8, position_width=8, keys=8, messages=8, widths=(8,)
)


def third(config: ConfigDict) -> None:
  """3rd place: linear attention beside SAGE in both directions, separate layers for positions.

  A step has four slates of 16 configurations. Every configuration comes once per pass over the
  programs, and an epoch may end within a pass. The loss is the sum of hinges over the pairs of a
  slate, averaged over slates. Adam has cosine decay to 1e-6.
  """
  config.data.update(
    features=("wide_logarithms", "operand_shapes", "tile_modulo", "random_walk"),
    feature_transform="operand_shapes=log_offset(3),*=none",
    config_transform="none",
    virtual_node="output",
  )
  config.batch.update(graphs=4, configs=16, min_configs=16, graph_sampling="every_config")
  config.model = base.model("layout", "Third")
  config.loss.update(losses="PairwiseHingeLoss:1", pair_reduction="sum")
  config.optimizer.update(schedule="cosine", final_learning_rate=1e-6, clip_norm=1.0)


def tile_third(config: ConfigDict) -> None:
  """3rd place, tiles: four SAGE layers with layer norm, the inverse logarithm of hinges.

  A step has 16 slates of 16 tiles. Every tile comes once per epoch; kernels with fewer than 16
  tiles are left out. Adam has cosine decay to 1e-6, without clipping.
  """
  config.data.update(
    features=("wide_logarithms", "directed_walk"),
    feature_transform="none",
    config_transform="none",
    virtual_node="output",
  )
  config.batch.update(graphs=16, configs=16, min_configs=16, graph_sampling="every_config")
  config.model = base.model("tile", "Third")
  config.loss.update(losses="InverseLogHingeLoss:1")
  config.optimizer.update(schedule="cosine", final_learning_rate=1e-6)


LAYOUTS = {"third": third}
TILES = {"third": tile_third}
