"""Graph Segment Training (arXiv 2305.12322, kaidic/GST), and the 7th place.

Expected: see docs/records/race.md. The published runs took 20,000 passes over the programs on a
GPU. Here `train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=gst --workdir=out/gst
  python run_layout.py --config=configs/layout.py:xla-random,preset=seventh --workdir=out/seventh
"""

from typing import Any

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  LayoutDataOptions,
  LayoutEvalOptions,
  LossOptions,
  Model,
  Optimizer,
  SegmentOptions,
  TrainOptions,
)


def gst(collection: str, **options: Any) -> Config:
  """Graph Segment Training of TpuGraphs (arXiv 2305.12322, public code).

  A step has 32 programs with 32 configurations each, drawn with replacement. Segments are ranges of
  at most 1,000 nodes, and one segment per program has gradients. Each stale score of the other
  segments is kept with probability 0.5. Hinges with margin 0.1 are summed over the pairs of a
  slate. Adam has weight decay in the gradient. Validation is on 32 configurations.

  A stale score is used for the configuration that it was computed for. The public code uses it for
  other configurations if a program has more than two segments. For a batch of several programs it
  reads and writes the history of the last program's configurations.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection, feature_transform="gst", fit_splits=("train", "valid", "test")
    ),
    batch=BatchOptions(
      graphs=32, configs=32, sampling="uniform_replacement", slates_per_epoch=1024
    ),
    segments=SegmentOptions(
      partition="published",
      max_nodes=1000,
      fresh=1,
      keep=0.5,
      keep_unit="entry",
      readout="scalar",
      aggregation="sum",
    ),
    model=Model("GST", **options),
    loss=LossOptions("PairwiseHingeLoss:1", pair_reduction="sum", margin=0.1),
    optimizer=Optimizer(
      "adam_l2", learning_rate=1e-4, schedule="cosine", eps=1e-8, weight_decay=5e-4
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau", valid_configs=32),
    eval=LayoutEvalOptions(graphs=4),
  )


def seventh(collection: str) -> Config:
  """7th place: Graph Segment Training with an activation after each round.

  Published: the system is based on the code of Graph Segment Training, samples segments to save
  memory, has additional models by edge and by shape of nodes, and ranks tiles with the official
  model (the default of `configs/tile.py`). There is no public code. The additional models are left
  out here.
  """
  return gst(collection, activate_rounds=True)


LAYOUTS = {"preset=gst": gst, "preset=seventh": seventh}
