"""The 4th place of the competition "Fast or Slow?", after its write-up.

Expected: see docs/records/race.md. The length of the published runs is not known. Here
`train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=fourth --workdir=out/fourth
"""

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  LayoutDataOptions,
  LossOptions,
  Model,
  Optimizer,
  TrainOptions,
)


def fourth(collection: str) -> Config:
  """4th place: bilinear pooling of edges at configurable nodes, no message passing.

  Targets are ranks, as published. Not published and chosen here: ListMLE, AdamW with cosine decay
  and clipping, four slates of 32 configurations, standardised features, layouts padded with -1, and
  the fastest runtime of equal configurations.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection,
      feature_transform="standardize",
      pad_value=-1,
      duplicate_policy="min",
      graph_reduction="config_neighborhood",
      reduction_hops=1,
      reduction_direction="operands",
      reduction_induced="edge",
    ),
    batch=BatchOptions(graphs=4, configs=32, target="rank", slates_per_epoch=1024),
    model=Model("Fourth"),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer("adamw", learning_rate=1e-3, schedule="cosine", eps=1e-8, clip_norm=1.0),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
  )


LAYOUTS = {"preset=fourth": fourth}
