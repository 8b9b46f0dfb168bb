"""The 1st place of the competition "Fast or Slow?" (thanhhau097/google_fast_or_slow).

Expected: see docs/records/race.md. The published runs took 750 epochs for XLA, 1,000 epochs for NLP
and 100,000 updates for tiles, on a GPU. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-default,preset=first --workdir=out/first
  python run_tile.py --config=configs/tile.py:preset=first --workdir=out/first
"""

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


def first(collection: str) -> Config:
  """1st place: attention across configurations, instance norm, one hop around choices.

  A step has one program with 64 configurations. Random collections have 128 and no attention across
  configurations. Equal configurations keep their first measurement. Slates of validation have 128
  (XLA), 256 (NLP) or 512 (random) configurations. Final scores are means over ten permutations, as
  in the write-up.
  """
  across, is_nlp = collection.endswith("-default"), collection.startswith("nlp")
  return Config(
    data=LayoutDataOptions.of(
      collection,
      features=("first", "first_layout"),
      feature_transform="first_layout=none,*=first",
      duplicate_policy="first",
      fit_reduced=True,
      graph_reduction="config_neighborhood",
      reduction_hops=1,
      reduction_direction="both",
      reduction_induced="edge",
    ),
    batch=BatchOptions(graphs=1, configs=64 if across else 128, slates_per_epoch=1024),
    model=Model("First", across_configs=across),
    loss=LossOptions("PairwiseHingeLoss:1", pair_reduction="mean_all"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=1e-3,
      eps=1e-8,
      weight_decay=1e-5,
      schedule="cosine",
      warmup_fraction=0.05,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
    eval=LayoutEvalOptions(configs=512 if not across else 256 if is_nlp else 128, permutations=10),
  )


def tile_first(collection: str) -> Config:
  """1st place, tiles: the layout model on kernels, and an MLP on the tile.

  Published: a step has one kernel with all of its tiles. Here it has at most 64 tiles, because
  batches have few shapes.
  """
  return Config(
    data=TileDataOptions.of(
      collection,
      features=("first_tile", "first_tile_layout"),
      feature_transform="first_tile_layout=none,*=first",
      config_transform="first",
      loader_threads=0,
    ),
    batch=BatchOptions(graphs=1, configs=64, target="official"),
    model=Model("First"),
    loss=LossOptions("PairwiseHingeLoss:1", pair_reduction="mean_all"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=1e-3,
      eps=1e-8,
      weight_decay=1e-5,
      schedule="cosine",
      warmup_fraction=0.05,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=100, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


LAYOUTS = {"preset=first": first}
TILES = {"preset=first": tile_first}
