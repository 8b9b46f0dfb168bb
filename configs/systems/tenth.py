"""The 10th place of the competition "Fast or Slow?", after its write-up.

Expected: see docs/records/race.md. The published runs of layouts took 16 epochs, of
tiles 5 epochs and less than a minute, on a GPU; here a run is as long as configs/layout.py and
configs/tile.py say.

  python run_layout.py --config=configs/layout.py:xla-random,preset=tenth --workdir=out/tenth
  python run_layout.py --config=configs/layout.py:nlp-random,preset=tenth --workdir=out/tenth_nlp
  python run_tile.py --config=configs/tile.py:preset=tenth --workdir=out/tenth_tile
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(op_embed_dim=8, width=8, blocks=2, mlp_widths=(8, 8))  # variant `ci`


def layouts(config: ConfigDict) -> None:
  """10th place: a transformer over nodes that runs once for all configurations.

  Twelve blocks of linear attention and APPNP of width 256; for NLP DIFFormer, of which the
  published members have four to six layers (here five). ListMLE over 256 to 1000
  configurations (here 256), AdamW with a decay and a cosine. Node features are log(x + 3);
  columns with numbers of -3 and less have a standardised signed logarithm here.
  """
  _common(config)
  config.data.update(
      feature_transform="window=signed_log1p,padding=signed_log1p,slice=signed_log1p,"
                        "*=log_offset(3)", config_transform="none", pad_value=-1,
      duplicate_policy="min")
  config.batch.update(graphs=1, configs=256)
  config.eval.configs = 256
  members = dict(attention="difformer", gated=True, blocks=5) if config.data.source == "nlp" else {}
  config.model = base.model("layout", "Tenth", **members)


def tiles(config: ConfigDict) -> None:
  """10th place, tiles: configurations ask the nodes of their kernel.

  Eight graph blocks, two of self-attention and four of cross-attention. Scaling, slates and
  widths are not published.
  """
  _common(config)
  config.data.update(feature_transform="signed_log1p", config_transform="signed_log1p")
  config.batch.update(graphs=16, configs=32)
  config.model = base.model("tile", "Tenth")


def _common(config: ConfigDict) -> None:
  config.loss.losses = "ListMLELoss:1"
  config.optimizer.update(learning_rate=5e-4, weight_decay=1e-2, schedule="cosine")


LAYOUTS = {"tenth": layouts}
TILES = {"tenth": tiles}
