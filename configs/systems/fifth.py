"""The 5th place of the competition "Fast or Slow?" (knshnb/kaggle-tpu-graph-5th-place).

Expected: see docs/records/race.md. The published runs took two epochs (16 for tiles) on several
GPUs. A published epoch has sqrt(c m) / k slates of a graph with c configurations: m is the largest
number of configurations of a graph, k the size of a slate. Here `train.epochs` sets the length of a
run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=fifth --workdir=out/fifth
  python run_layout.py --config=configs/layout.py:xla-random,preset=fifth_all --workdir=out/all
  python run_tile.py --config=configs/tile.py:preset=fifth --workdir=out/fifth_tile
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base
from tpugraphs_jax.datasets import RELEASED

SMALL = dict(  # variant `ci`
  op_embed_dim=8, width=16, num_layers=1, token_width=16, token_layers=1
)


def fifth(config: ConfigDict) -> None:
  """5th place: SAGE over users beside SAGE over operands, pairs across graphs.

  A step has four slates of eight configurations. Graphs are drawn in proportion to the root of
  their number of configurations. Hinges with a margin of 1 ms are over the pairs of each slate and
  over all pairs of a step, with equal weights. `fifth` trains on one collection, `fifth_all` on
  all.
  """
  _common(config)
  config.data.features += ("fifth_layout",)
  config.batch.update(graphs=4, configs=8)
  config.model = base.model("layout", "Fifth")
  config.loss.margin = 1.0
  config.optimizer.learning_rate = 1e-4


def fifth_all(config: ConfigDict) -> None:
  """5th place: `fifth` as one network for the four layout collections.

  All graphs are in one list and drawn as in `fifth`. The published network also trains on slates of
  tiles, with a margin of 0.1. Tiles are missing here, because a network for both kinds of batches
  would be longer than the rest of the system. A collection `own-NAME` is trained alone unless
  `data.also` names other collections.
  """
  fifth(config)
  collection = ":".join(("layout", config.data.source, config.data.search))
  if collection in RELEASED:
    layouts = [name for name in RELEASED if name.startswith("layout:")]
    config.data.also = tuple(name for name in layouts if name != collection)


def tile_fifth(config: ConfigDict) -> None:
  """5th place, tiles: a transformer over tokens before SAGE.

  A step has 128 slates of 32 tiles, drawn with replacement (published: without, from copies that
  fill every slate). A virtual node consumes all nodes of a kernel. Hinges are as in `fifth`, with a
  margin of 0.1 ms. The network processes eight tiles at a time to save memory.
  """
  _common(config)
  config.data.update(virtual_node="cluster", cluster_nodes=10_000)
  config.batch.update(graphs=128, configs=32, config_chunk=8, sampling="uniform_replacement")
  config.model = base.model("tile", "Fifth")
  config.loss.margin = 0.1


def _common(config: ConfigDict) -> None:
  config.data.update(
    features=("fifth_columns", "fifth_tokens"), feature_transform="none", config_transform="none"
  )
  config.batch.update(graph_sampling="sqrt", target="absolute")
  config.loss.update(losses="PairwiseHingeLoss:1,CrossHingeLoss:1", pair_reduction="mean_all")
  config.optimizer.update(weight_decay=1e-2, schedule="cosine", clip_norm=1.0)


LAYOUTS = {"fifth": fifth, "fifth_all": fifth_all}
TILES = {"fifth": tile_fifth}
