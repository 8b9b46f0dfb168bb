"""The 1st place of the competition "Fast or Slow?" (thanhhau097/google_fast_or_slow).

Expected: see docs/records/race.md. The published runs took 750 epochs for XLA, 1,000 epochs for NLP
and 100,000 updates for tiles, on a GPU. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-default,preset=first --workdir=out/first
  python run_tile.py --config=configs/tile.py:preset=first --workdir=out/first
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(op_embed_dim=8, width=16)  # variant `ci`


def first(config: ConfigDict) -> None:
  """1st place: attention across configurations, instance norm, one hop around choices.

  A step has one program with 64 configurations. Random collections have 128 and no attention across
  configurations. Equal configurations keep their first measurement. Slates of validation have 128
  (XLA), 256 (NLP) or 512 (random) configurations. Final scores are means over ten permutations, as
  in the write-up.
  """
  across = config.data.search == "default"
  config.data.update(
    features=("first", "first_layout"),
    feature_transform="first_layout=none,*=first",
    config_transform="none",
    duplicate_policy="first",
    fit_reduced=True,
    graph_reduction="config_neighborhood",
    reduction_hops=1,
    reduction_direction="both",
    reduction_induced="edge",
  )
  slate = (256 if config.data.source == "nlp" else 128) if across else 512
  config.batch.update(graphs=1, configs=64 if across else 128)
  config.eval.update(configs=slate, permutations=10)
  config.model = base.model("layout", "First", across_configs=across)
  _training(config)


def tile_first(config: ConfigDict) -> None:
  """1st place, tiles: the layout model on kernels, and an MLP on the tile.

  Published: a step has one kernel with all of its tiles. Here it has at most 64 tiles, because
  batches have few shapes.
  """
  config.data.update(
    features=("first_tile", "first_tile_layout"),
    config_transform="first",
    feature_transform="first_tile_layout=none,*=first",
  )
  config.batch.update(graphs=1, configs=64, target="official")
  config.model = base.model("tile", "First")
  _training(config)


def _training(config: ConfigDict) -> None:
  """Hinges of all pairs with margin 1, divided by C^2; AdamW with warm-up and cosine decay."""
  config.loss.update(losses="PairwiseHingeLoss:1", pair_reduction="mean_all")
  config.optimizer.update(weight_decay=1e-5, schedule="cosine", warmup_fraction=0.05, clip_norm=1.0)


LAYOUTS = {"first": first}
TILES = {"first": tile_first}
