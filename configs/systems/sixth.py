"""The 6th place of the competition "Fast or Slow?" (hengck23/solution-predict-ai-model-runtime).

Expected: see docs/records/race.md. The published runs took 1.2 to 7.5 epochs, each with every
configuration once, on a GPU in half precision; random XLA layouts started from a model of NLP
layouts. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=sixth --workdir=out/sixth
  python run_layout.py --config=configs/layout.py:xla-default,preset=sixth_gin --workdir=out/gin
  python run_tile.py --config=configs/tile.py:preset=sixth --workdir=out/sixth
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


def sixth(collection: str, *, model: str = "Sixth") -> Config:
  """6th place: five hops of users, instance norm, a head that normalises across the slate.

  A slate has 80 (NLP), 32 (default) or 100 (random) configurations; an update accumulates gradients
  of 32 slates. Every configuration comes once per pass over the programs, and an epoch may end
  within a pass. Scores are computed in slates of 100. The parameters are a mean over the second
  half of a run (published: over a window chosen by hand).
  """
  nlp, random = collection.startswith("nlp"), collection.endswith("-random")
  return Config(
    data=LayoutDataOptions.of(
      collection,
      feature_transform="sixth",
      graph_reduction="config_neighborhood",
      reduction_hops=5,
      reduction_direction="users",
      reduction_induced="node",
    ),
    batch=BatchOptions(
      graphs=1,
      configs=80 if nlp else 100 if random else 32,
      graph_sampling="every_config",
      slates_per_epoch=1024,
    ),
    model=Model(model),
    loss=LossOptions("OrderedLogisticLoss:1"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=5e-4,
      eps=1e-8,
      weight_decay=1e-2,
      accumulation_steps=32,
      average_window=(0.5, 1.0),
    ),
    # The mean over the whole window.
    train=TrainOptions(epochs=10, best_metric="kendaltau", result="last"),
    eval=LayoutEvalOptions(configs=100),
  )


def sixth_gin(collection: str) -> Config:
  """6th place, default XLA layouts: `sixth` with GIN and a readout of all layers.

  The published scores are sums of the scores of both networks.
  """
  return sixth(collection, model="SixthGIN")


def tile_sixth(collection: str) -> Config:
  """6th place, tiles: GATv2 on kernels; the tile joins mean and maximum over nodes.

  A step has 32 slates of 64 tiles, with ListMLE. Every tile comes once per epoch. Scores are
  computed in slates of 100.
  """
  return Config(
    data=TileDataOptions.of(
      collection, feature_transform="sixth", config_transform="sixth", loader_threads=0
    ),
    batch=BatchOptions(graphs=32, configs=64, graph_sampling="every_config", target="official"),
    model=Model("Sixth"),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer("adamw", learning_rate=5e-4, eps=1e-8, weight_decay=1e-2),
    train=TrainOptions(epochs=100, valid_configs=256, log_every_steps=100),
    eval=EvalOptions(graphs=8, configs=100),
  )


LAYOUTS = {"preset=sixth": sixth, "preset=sixth_gin": sixth_gin}
TILES = {"preset=sixth": tile_sixth}
