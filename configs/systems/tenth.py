"""The 10th place of the competition "Fast or Slow?", after its write-up.

Expected: see docs/records/race.md. The published runs took 16 epochs for layouts, and 5 epochs in
less than a minute for tiles, on a GPU. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=tenth --workdir=out/tenth
  python run_layout.py --config=configs/layout.py:nlp-random,preset=tenth --workdir=out/tenth_nlp
  python run_tile.py --config=configs/tile.py:preset=tenth --workdir=out/tenth_tile
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

_SCALES = "window=signed_log1p,padding=signed_log1p,slice=signed_log1p,*=log_offset(3)"


def layouts(collection: str) -> Config:
  """10th place: a transformer over nodes that runs once for all configurations.

  The network has twelve blocks of linear attention and APPNP of width 256. For NLP it is DIFFormer
  with five layers; the published models have four to six. Training has ListMLE over 256
  configurations (published: 256 to 1000), and AdamW with weight decay and cosine decay. Node
  features are log(x + 3). Columns with values of -3 and less have a standardised signed logarithm.
  """
  is_nlp = collection.startswith("nlp")
  return Config(
    data=LayoutDataOptions.of(
      collection, feature_transform=_SCALES, pad_value=-1, duplicate_policy="min"
    ),
    batch=BatchOptions(graphs=1, configs=256, slates_per_epoch=1024),
    model=Model("Tenth", **_DIFFORMER if is_nlp else {}),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer(
      "adamw", learning_rate=5e-4, schedule="cosine", eps=1e-8, weight_decay=1e-2
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
    eval=LayoutEvalOptions(configs=256),
  )


def tiles(collection: str) -> Config:
  """10th place, tiles: configurations attend to the nodes of their kernel.

  The network has eight blocks on nodes, two of them with self-attention, and four blocks of
  cross-attention. Scaling, slates and widths are not published.
  """
  return Config(
    data=TileDataOptions.of(
      collection,
      feature_transform="signed_log1p",
      config_transform="signed_log1p",
      loader_threads=0,
    ),
    batch=BatchOptions(graphs=16, configs=32, target="official"),
    model=Model("Tenth"),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer(
      "adamw", learning_rate=5e-4, schedule="cosine", eps=1e-8, weight_decay=1e-2
    ),
    train=TrainOptions(epochs=100, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=64),
  )


_DIFFORMER = dict(attention="difformer", gated=True, blocks=5)
LAYOUTS = {"preset=tenth": layouts}
TILES = {"preset=tenth": tiles}
