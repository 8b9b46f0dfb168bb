"""S2GNN (arXiv 2405.19121), after `tpugraphs-s2gnn-layout-mix-10000` of sigeisler/s2gnn.

The published run took 1,000 epochs on one GPU, each with one slate of every program of the four
layout collections. Here `train.epochs` sets the length of a run. Eigenvectors of programs are
computed once, in seconds to minutes each, and kept in the user's cache.

  python run_layout.py --config=configs/layout.py:xla-random,preset=s2gnn --workdir=out/s2gnn
  python run_layout.py --config=configs/layout.py:xla-random,preset=s2gnn_all --workdir=out/all
"""

from tpugraphs_jax.datasets import RELEASED
from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  LayoutDataOptions,
  LayoutEvalOptions,
  LossOptions,
  Model,
  Optimizer,
  TrainOptions,
)

# All layers but the last one.
_DECAYING = (
  *("op_weights", "config_weights", "opcodes", "features", "positions", "layouts"),
  *("first", "first_prelu", "second", "second_prelu", "frequencies", "filter_0", "filter_1"),
  *("messages_0", "messages_0_prelu", "messages_1", "messages_1_prelu"),
  *("messages_2", "messages_2_prelu", "readout", "norm", "amplitude_norm", "hidden", "prelu"),
)


def s2gnn(collection: str) -> Config:
  """S2GNN: message passing and filters on the eigenvectors of a program, in turns.

  A step has eight programs with 104 configurations each, drawn with replacement. That is the
  published number for 10,000 nodes: it is 52 times the root of 40,000 by the number of nodes, and a
  batch here has one number. Programs keep at most 10,000 configurations (published: 1 % fastest,
  1 % slowest, and others in favour of fast ones; here in thirds). Hinges with margin 0.1 are
  averaged over the pairs of a slate. The gradients of eight programs are added and clipped to norm
  1, which is a mean clipped to 1 / 8. Weights of the last layer do not decay.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection,
      features=("logarithms_from_one", "spectrum"),
      feature_transform="spectrum=none,*=minmax",
      config_transform="none",
      max_configs=10_000,
    ),
    batch=BatchOptions(
      graphs=1, configs=104, config_chunk=8, sampling="uniform_replacement", slates_per_epoch=1024
    ),
    model=Model("S2GNN"),
    loss=LossOptions("PairwiseHingeLoss:1", margin=0.1, pair_reduction="mean_valid"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=1e-3,
      eps=1e-8,
      weight_decay=5e-4,
      decay_layers=_DECAYING,
      schedule="cosine",
      warmup_fraction=0.01,
      clip_norm=1 / 8,
      accumulation_steps=8,
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
    eval=LayoutEvalOptions(graphs=1, configs=100),
  )


def s2gnn_all(collection: str) -> Config:
  """S2GNN: `s2gnn` as one network for the four layout collections, as published.

  A collection `own-NAME` is trained alone unless `data.also` names other collections.
  """
  config, this = s2gnn(collection), f"layout:{collection.replace('-', ':')}"
  others = [name for name in RELEASED if name.startswith("layout:") and name != this]
  return config.replace(data__also=others if this in RELEASED else ())


LAYOUTS = {"preset=s2gnn": s2gnn, "preset=s2gnn_all": s2gnn_all}
