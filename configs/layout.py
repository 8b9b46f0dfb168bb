"""Layout rankers for whole programs.

After the colon stand at most one collection, one ranker and `ci`, separated by commas, in any
order (`VARIANTS`). The default is GraphSAGE with Graph Segment Training on `xla-random`: it
trains graphs of more than 5,000 nodes in segments, with a table of stale readouts and dropout of
its entries, and smaller graphs whole (docs/segments.md). `full` trains on whole graphs of any size.
`recommended` is for ranking programs that are not in the training data (configs/systems/tables.py).
On your programs with choices other than output orders, or with times measured on a CPU, start with
`official` (configs/systems/official.py).

Expected Kendall tau (mean over validation graphs) of `full` after 3 of 10 epochs on the synthetic
`medium` data, on one CPU core, for xla-random, xla-default, nlp-random and nlp-default: 0.63, 0.69,
0.77 and 0.71 in 4 to 5 minutes. On the released AlexNet two epochs of `xla-default,full` reach 0.77
in 41 CPU seconds.

  python run_layout.py --config=configs/layout.py:xla-random --workdir=out/xla_random
  python run_layout.py --config=configs/layout.py:xla-random,full --workdir=out/full
"""

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  FinetuneOptions,
  LayoutDataOptions,
  LayoutEvalOptions,
  LossOptions,
  Model,
  Optimizer,
  SegmentOptions,
  TrainOptions,
)
from tpugraphs_jax.run import variants

COLLECTIONS = ("xla-random", "xla-default", "nlp-random", "nlp-default", "own")


def full(collection: str, segments: SegmentOptions | None = None) -> Config:
  """GraphSAGE on whole graphs."""
  return Config(
    data=LayoutDataOptions.of(
      collection,
      feature_transform="signed_log1p",
      pad_value=-1,  # positions of a layout beyond the rank
      duplicate_policy="min",  # of equal configurations the fastest
    ),
    batch=BatchOptions(
      graphs=8,  # in a step, over all devices
      configs=16,  # of each graph
      slates_per_epoch=1024,
      target="ratio",
    ),
    segments=segments,
    model=Model("SAGE", op_embed_dim=32, hidden_dim=64),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=3e-3,
      schedule="cosine",
      warmup_fraction=0.05,
      weight_decay=1e-4,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
    eval=LayoutEvalOptions(graphs=4 if segments else 1),  # segments or graphs in a scoring call
  )


def default(collection: str) -> Config:
  """GraphSAGE, graphs above 5,000 nodes in segments: smaller segments cost quality."""
  return full(collection, SegmentOptions(keep=0.5, max_nodes=5000))


def gst_ed(collection: str) -> Config:
  """GraphSAGE, graphs above 1,000 nodes (the default: 5,000) in segments.

  A step has gradients of one segment. It reads stale readouts of the other segments, and keeps a
  stale readout with probability 0.5.
  """
  return full(collection, SegmentOptions(keep=0.5))


def gst(collection: str) -> Config:
  """As gst_ed, but other segments are recomputed without gradients."""
  return full(collection, SegmentOptions(keep=1.0, recompute=True))


def gst_e(collection: str) -> Config:
  """As gst_ed, but all stale readouts are kept."""
  return full(collection, SegmentOptions(keep=1.0))


def gst_efd(collection: str) -> Config:
  """As gst_ed, then trains the head alone on exact readouts."""
  return full(collection, SegmentOptions(keep=0.5, finetune=FinetuneOptions(epochs=30)))


def one(collection: str) -> Config:
  """As gst_ed, but other segments are ignored."""
  return full(collection, SegmentOptions(keep=0.0))


RANKERS = {
  "": default,
  "full": full,
  "gst_ed": gst_ed,
  "gst": gst,
  "gst_e": gst_e,
  "gst_efd": gst_efd,
  "one": one,
} | variants.systems("layout")
VARIANTS = variants.described(
  {name: "the collection" for name in COLLECTIONS[:-1]}
  | {"own": "the programs of data/own with their output orders; needs --data_root=data/own/npz"},
  RANKERS,
)


def get_config(variant: str = "xla-random") -> Config:
  """The config of a collection, a ranker and `ci`: see `VARIANTS`."""
  collection, ranker, ci = variants.parse(
    variant, file="layout.py", collections=COLLECTIONS, rankers=RANKERS
  )
  collection = "own-outputs" if collection == "own" else collection or "xla-random"
  config = RANKERS[ranker](collection)
  return variants.small(config) if ci else config
