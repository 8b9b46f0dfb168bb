"""The 4th place of the competition "Fast or Slow?", after its write-up.

Expected: see docs/records/race.md. The length of the published runs is not known. Here
`train.epochs` sets the length of a run.

  python run_layout.py --config=configs/layout.py:xla-random,preset=fourth --workdir=out/fourth
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

# Variant `ci`.
SMALL = dict(op_embed_dim=8, edge_widths=(8,), config_widths=(8,), head_widths=(8,))


def fourth(config: ConfigDict) -> None:
  """4th place: bilinear pooling of edges at configurable nodes, no message passing.

  Targets are ranks, as published. Not published and chosen here: ListMLE, AdamW with cosine decay
  and clipping, four slates of 32 configurations, standardised features, layouts padded with -1, and
  the fastest runtime of equal configurations.
  """
  config.data.update(
    feature_transform="standardize",
    config_transform="none",
    pad_value=-1,
    duplicate_policy="min",
    graph_reduction="config_neighborhood",
    reduction_hops=1,
    reduction_direction="operands",
    reduction_induced="edge",
  )
  config.batch.update(graphs=4, configs=32, target="rank")
  config.model = base.model("layout", "Fourth")
  config.loss.losses = "ListMLELoss:1"
  config.optimizer.update(schedule="cosine", clip_norm=1.0)


LAYOUTS = {"fourth": fourth}
TILES = {}
