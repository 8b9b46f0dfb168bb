"""The 2nd place of the competition "Fast or Slow?" (Obs01ete/kaggle_latenciaga).

Expected: see docs/records/race.md. The published runs took 200,000 updates (400,000 for tiles) on a
GPU. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-default,preset=second_xla --workdir=out/second
  python run_layout.py --config=configs/layout.py:nlp-default,preset=second_nlp --workdir=out/second
  python run_tile.py --config=configs/tile.py:preset=second_tile --workdir=out/second
"""

from typing import Any

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


def second_xla(collection: str) -> Config:
  """2nd place, XLA: a runtime per node, margins in units of the runtime.

  The loss is DiffMat with a margin of 10 ms plus the mean absolute percentage error. A step has ten
  slates of four configurations, drawn with replacement. Training leaves out graphs named `unet`.
  Equal configurations count once, with their fastest runtime.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection, features=("second",), duplicate_policy="min", leave_out=("unet",)
    ),
    batch=BatchOptions(
      graphs=10, configs=4, sampling="uniform_replacement", target="official", slates_per_epoch=1024
    ),
    # Sums over nodes are in milliseconds, labels in units of 10 ms.
    model=Model("Second", score_scale=0.1),
    loss=LossOptions("DiffMatLoss:1,MAPE:1", margin=1.0, normalize_weights=False),
    optimizer=_adamw(),
    train=TrainOptions(epochs=10, best_metric="kendaltau", result="last"),
  )


def second_nlp(collection: str) -> Config:
  """2nd place, NLP: as `second_xla`, wider and deeper, with residuals and ListMLE.

  A step has four slates of ten configurations. The scores of a slate are scaled to at most length
  500. AdamW has an epsilon of 1e-6 and weight decay on the output layer alone. Gradients are
  clipped at a norm of 100.
  """
  return Config(
    data=LayoutDataOptions.of(collection, features=("second_nlp",), duplicate_policy="min"),
    batch=BatchOptions(
      graphs=4, configs=10, sampling="uniform_replacement", target="official", slates_per_epoch=1024
    ),
    model=Model(
      "Second", first_width=64, widths=(256,) * 4 + (512,) * 4, residual=True, score_scale=1e-3
    ),
    loss=LossOptions("ListMLELoss:1", score_norm_clip=500.0),
    optimizer=_adamw(eps=1e-6, clip_norm=100.0, weight_decay=1e-4, decay_layers=("node",)),
    train=TrainOptions(epochs=10, best_metric="kendaltau", result="last"),
  )


def second_tile(collection: str) -> Config:
  """2nd place, tiles: eight SAGE rounds, DiffMat.

  A step has a hundred slates of ten tiles. Runtimes, margin (0.1) and loss are in units of the
  default tile's runtime. Equal tiles count once, with their fastest runtime.
  """
  return Config(
    data=TileDataOptions.of(
      collection, features=("second",), duplicate_policy="min", loader_threads=0
    ),
    batch=BatchOptions(graphs=100, configs=10, sampling="uniform_replacement", target="official"),
    model=Model("Second", first_width=64, widths=(256,) * 4 + (512,) * 4),
    loss=LossOptions("DiffMatLoss:0.1", margin=0.1, normalize_weights=False),
    optimizer=_adamw(),
    train=TrainOptions(epochs=100, result="last", valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


def _adamw(*, eps: float = 1e-8, **options: Any) -> Optimizer:
  """AdamW whose rate is divided by the root of 10 four times."""
  return Optimizer(
    "adamw",
    learning_rate=1e-3,
    schedule="multistep",
    milestones=(0.6, 0.7, 0.8, 0.9),
    milestone_factor=10**-0.5,
    eps=eps,
    **options,
  )


LAYOUTS = {"preset=second_xla": second_xla, "preset=second_nlp": second_nlp}
TILES = {"preset=second_tile": second_tile}
