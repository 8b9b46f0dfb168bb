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

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base
from tpugraphs_jax.configs.base import RankerSettings
from tpugraphs_jax.configs.systems import official, tables

COLLECTIONS = ("xla-random", "xla-default", "nlp-random", "nlp-default", "own")
_SMALL = dict(op_embed_dim=8, hidden_dim=16, num_gnns=1)  # for `ci`


def full(config: ConfigDict) -> None:
  """GraphSAGE on whole graphs."""
  config.model = base.model("layout", "SAGE", op_embed_dim=32, hidden_dim=64)


def default(config: ConfigDict) -> None:
  """GraphSAGE, graphs above 5,000 nodes in segments: smaller segments cost quality."""
  full(config)
  base.in_segments(config, keep=0.5, max_nodes=5000)


def gst_ed(config: ConfigDict) -> None:
  """GraphSAGE, graphs above 1,000 nodes (the default: 5,000) in segments.

  A step has gradients of one segment. It reads stale readouts of the other segments, and keeps a
  stale readout with probability 0.5.
  """
  full(config)
  base.in_segments(config, keep=0.5)


def gst(config: ConfigDict) -> None:
  """As gst_ed, but other segments are recomputed without gradients."""
  full(config)
  base.in_segments(config, keep=1.0, recompute=True)


def gst_e(config: ConfigDict) -> None:
  """As gst_ed, but all stale readouts are kept."""
  full(config)
  base.in_segments(config, keep=1.0)


def gst_efd(config: ConfigDict) -> None:
  """As gst_ed, then trains the head alone on exact readouts."""
  full(config)
  base.in_segments(config, keep=0.5, finetune_epochs=30)


def one(config: ConfigDict) -> None:
  """As gst_ed, but other segments are ignored."""
  full(config)
  base.in_segments(config, keep=0.0)


RANKERS = {
  name: RankerSettings(change, _SMALL)
  for name, change in {
    "": default,
    "full": full,
    "gst_ed": gst_ed,
    "gst": gst,
    "gst_e": gst_e,
    "gst_efd": gst_efd,
    "one": one,
    "official": official.programs,
    **tables.PROGRAMS,
  }.items()
} | base.presets("layout")
OWN_RANKERS = {"recommended": RANKERS["traffic"]}  # in place of a ranker, on own programs
VARIANTS = base.variants(
  {name: "the collection" for name in COLLECTIONS[:-1]}
  | {"own": "the programs of data/own with their output orders; needs --data_root=data/own/npz"},
  RANKERS,
)


def get_config(variant: str = "xla-random") -> ConfigDict:
  """The config of a collection, a ranker and `ci`: see `VARIANTS`."""
  collection, ranker, ci = base.arguments(
    variant, file="layout.py", collections=COLLECTIONS, rankers=RANKERS
  )
  collection = "own-outputs" if collection == "own" else collection or "xla-random"
  config = base.defaults("layout", collection)

  # Data.
  config.data.feature_transform = "signed_log1p"
  config.data.pad_value = -1  # positions of a layout beyond the rank
  config.data.duplicate_policy = "min"  # of equal configurations the fastest

  # Slates.
  config.batch.graphs = 8  # in a step, over all devices
  config.batch.configs = 16  # of each graph
  config.batch.slates_per_epoch = 1024
  config.batch.target = "ratio"

  # Loss.
  config.loss.losses = "ListMLELoss:1"
  config.loss.temperature = 1.0

  # Optimizer.
  config.optimizer.name = "adamw"
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = "cosine"
  config.optimizer.warmup_fraction = 0.05
  config.optimizer.weight_decay = 1e-4
  config.optimizer.clip_norm = 1.0

  # Length, and the choice of the checkpoint.
  config.train.epochs = 10
  config.train.best_metric = "kendaltau"

  # Model, and what its ranker changes.
  own = OWN_RANKERS if config.data.source == "own" else {}
  own.get(ranker, RANKERS[ranker]).apply(config, ci=ci)
  return config
