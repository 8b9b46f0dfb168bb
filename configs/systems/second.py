"""The 2nd place of the competition "Fast or Slow?" (Obs01ete/kaggle_latenciaga).

Expected: see docs/records/race.md. The published runs took 200,000 updates (400,000 for tiles) on a
GPU. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-default,preset=second_xla --workdir=out/second
  python run_layout.py --config=configs/layout.py:nlp-default,preset=second_nlp --workdir=out/second
  python run_tile.py --config=configs/tile.py:preset=second_tile --workdir=out/second
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(feature_width=8, op_embed_dim=8, first_width=8, widths=(8,))  # variant `ci`


def second_xla(config: ConfigDict) -> None:
  """2nd place, XLA: a runtime per node, margins in units of the runtime.

  The loss is DiffMat with a margin of 10 ms plus the mean absolute percentage error. A step has ten
  slates of four configurations, drawn with replacement. Training leaves out graphs named `unet`.
  Equal configurations count once, with their fastest runtime.
  """
  _common(config)
  config.data.leave_out = ("unet",)
  config.batch.update(graphs=10, configs=4)
  # Sums over nodes are in milliseconds, labels in units of 10 ms.
  config.model = base.model("layout", "Second", score_scale=0.1)
  config.loss.update(losses="DiffMatLoss:1,MAPE:1", margin=1.0, normalize_weights=False)


def second_nlp(config: ConfigDict) -> None:
  """2nd place, NLP: as `second_xla`, wider and deeper, with residuals and ListMLE.

  A step has four slates of ten configurations. The scores of a slate are scaled to at most length
  500. AdamW has an epsilon of 1e-6 and weight decay on the output layer alone. Gradients are
  clipped at a norm of 100.
  """
  _common(config)
  config.data.features = ("second_nlp",)
  config.batch.update(graphs=4, configs=10)
  config.model = base.model(
    "layout",
    "Second",
    first_width=64,
    widths=(256,) * 4 + (512,) * 4,
    residual=True,
    score_scale=1e-3,
  )
  config.loss.update(losses="ListMLELoss:1", score_norm_clip=500.0)
  config.optimizer.update(eps=1e-6, clip_norm=100.0, weight_decay=1e-4, decay_layers=("node",))


def second_tile(config: ConfigDict) -> None:
  """2nd place, tiles: eight SAGE rounds, DiffMat.

  A step has a hundred slates of ten tiles. Runtimes, margin (0.1) and loss are in units of the
  default tile's runtime. Equal tiles count once, with their fastest runtime.
  """
  _common(config)
  config.batch.update(graphs=100, configs=10)
  config.model = base.model("tile", "Second", first_width=64, widths=(256,) * 4 + (512,) * 4)
  config.loss.update(losses="DiffMatLoss:0.1", margin=0.1, normalize_weights=False)


def _common(config: ConfigDict) -> None:
  config.data.update(
    features=("second",), feature_transform="none", config_transform="none", duplicate_policy="min"
  )
  config.batch.update(sampling="uniform_replacement", target="official")
  config.optimizer.update(
    schedule="multistep", milestones=(0.6, 0.7, 0.8, 0.9), milestone_factor=10**-0.5
  )
  config.train.result = "last"


LAYOUTS = {"second_xla": second_xla, "second_nlp": second_nlp}
TILES = {"second_tile": second_tile}
