"""The 5th place of the competition "Fast or Slow?" (knshnb/kaggle-tpu-graph-5th-place).

Expected: see docs/records/race.md. The published runs took two epochs (16 for tiles) on several
GPUs. A published epoch has sqrt(c m) / k slates of a graph with c configurations: m is the largest
number of configurations of a graph, k the size of a slate. Here `train.epochs` sets the length of a
run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=fifth --workdir=out/fifth
  python run_layout.py --config=configs/layout.py:xla-random,preset=fifth_all --workdir=out/all
  python run_tile.py --config=configs/tile.py:preset=fifth --workdir=out/fifth_tile
"""

from tpugraphs_jax.datasets import RELEASED
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


def fifth(collection: str) -> Config:
  """5th place: SAGE over users beside SAGE over operands, pairs across graphs.

  A step has four slates of eight configurations. Graphs are drawn in proportion to the root of
  their number of configurations. Hinges with a margin of 1 ms are over the pairs of each slate and
  over all pairs of a step, with equal weights. `fifth` trains on one collection, `fifth_all` on
  all.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection, features=("fifth_columns", "fifth_tokens", "fifth_layout")
    ),
    batch=BatchOptions(
      graphs=4, configs=8, graph_sampling="sqrt", target="absolute", slates_per_epoch=1024
    ),
    model=Model("Fifth"),
    loss=LossOptions(_HINGES, pair_reduction="mean_all", margin=1.0),
    optimizer=Optimizer(
      "adamw", learning_rate=1e-4, schedule="cosine", eps=1e-8, weight_decay=1e-2, clip_norm=1.0
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
  )


def fifth_all(collection: str) -> Config:
  """5th place: `fifth` as one network for the four layout collections.

  All graphs are in one list and drawn as in `fifth`. The published network also trains on slates of
  tiles, with a margin of 0.1. Tiles are missing here, because a network for both kinds of batches
  would be longer than the rest of the system. A collection `own-NAME` is trained alone unless
  `data.also` names other collections.
  """
  config, this = fifth(collection), f"layout:{collection.replace('-', ':')}"
  others = [name for name in RELEASED if name.startswith("layout:") and name != this]
  return config.replace(data__also=others if this in RELEASED else ())


def tile_fifth(collection: str) -> Config:
  """5th place, tiles: a transformer over tokens before SAGE.

  A step has 128 slates of 32 tiles, drawn with replacement (published: without, from copies that
  fill every slate). A virtual node consumes all nodes of a kernel. Hinges are as in `fifth`, with a
  margin of 0.1 ms. The network processes eight tiles at a time to save memory.
  """
  return Config(
    data=TileDataOptions.of(
      collection,
      features=("fifth_columns", "fifth_tokens"),
      virtual_node="cluster",
      cluster_nodes=10_000,
      loader_threads=0,
    ),
    batch=BatchOptions(
      graphs=128,
      configs=32,
      config_chunk=8,
      sampling="uniform_replacement",
      graph_sampling="sqrt",
      target="absolute",
    ),
    model=Model("Fifth"),
    loss=LossOptions(_HINGES, pair_reduction="mean_all", margin=0.1),
    optimizer=Optimizer(
      "adamw", learning_rate=1e-3, schedule="cosine", eps=1e-8, weight_decay=1e-2, clip_norm=1.0
    ),
    train=TrainOptions(epochs=100, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


_HINGES = "PairwiseHingeLoss:1,CrossHingeLoss:1"
LAYOUTS = {"preset=fifth": fifth, "preset=fifth_all": fifth_all}
TILES = {"preset=fifth": tile_fifth}
