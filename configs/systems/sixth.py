"""The 6th place of the competition "Fast or Slow?" (hengck23/solution-predict-ai-model-runtime).

Expected: see docs/records/race.md. The published runs took 1.2 to 7.5 epochs, each with every
configuration once, on a GPU in half precision; random XLA layouts started from a model of NLP
layouts. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=sixth --workdir=out/sixth
  python run_layout.py --config=configs/layout.py:xla-default,preset=sixth_gin --workdir=out/gin
  python run_tile.py --config=configs/tile.py:preset=sixth --workdir=out/sixth
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(op_embed_dim=8, width=8, layers=1)  # variant `ci`


def sixth(config: ConfigDict) -> None:
  """6th place: five hops of users, instance norm, a head that normalises across the slate.

  A slate has 80 (NLP), 32 (default) or 100 (random) configurations; an update accumulates gradients
  of 32 slates. Every configuration comes once per pass over the programs, and an epoch may end
  within a pass. Scores are computed in slates of 100. The parameters are a mean over the second
  half of a run (published: over a window chosen by hand).
  """
  nlp, random = config.data.source == "nlp", config.data.search == "random"
  config.data.update(
    feature_transform="sixth",
    config_transform="none",
    graph_reduction="config_neighborhood",
    reduction_hops=5,
    reduction_direction="users",
    reduction_induced="node",
  )
  config.batch.update(graphs=1, configs=80 if nlp else 100 if random else 32)
  config.model = base.model("layout", "Sixth")
  config.loss.losses = "OrderedLogisticLoss:1"
  _training(config)
  config.optimizer.update(accumulation_steps=32, average_window=(0.5, 1.0))
  config.train.result = "last"  # the mean over the whole window


def sixth_gin(config: ConfigDict) -> None:
  """6th place, default XLA layouts: `sixth` with GIN and a readout of all layers.

  The published scores are sums of the scores of both networks.
  """
  sixth(config)
  config.model = base.model("layout", "SixthGIN")


def tile_sixth(config: ConfigDict) -> None:
  """6th place, tiles: GATv2 on kernels; the tile joins mean and maximum over nodes.

  A step has 32 slates of 64 tiles, with ListMLE. Every tile comes once per epoch. Scores are
  computed in slates of 100.
  """
  config.data.update(feature_transform="sixth", config_transform="sixth")
  config.batch.update(graphs=32, configs=64)
  config.model = base.model("tile", "Sixth")
  config.loss.update(losses="ListMLELoss:1")
  _training(config)


def _training(config: ConfigDict) -> None:
  config.batch.graph_sampling = "every_config"
  config.eval.configs = 100
  config.optimizer.update(learning_rate=5e-4, weight_decay=1e-2)


LAYOUTS = {"sixth": sixth, "sixth_gin": sixth_gin}
TILES = {"sixth": tile_sixth}
