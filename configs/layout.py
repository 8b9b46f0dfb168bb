"""Layout rankers for the four collections.

Variants are in `VARIANTS`, separated by commas, in any order. The default is GraphSAGE with
Graph Segment Training on `xla-random`: graphs of more than 5,000 nodes in segments, with a table
of stale readouts and dropout of its entries, smaller ones whole (docs/segments.md). `full`
trains on whole graphs of any size. `recommended` is for ranking programs that are not in the
training data: score tables on the collections of the data set (docs/results.md), and traffic
tables on own programs, which are few and choose output orders for a TPU (docs/own_programs.md).
On own programs with other choices, or with times measured on a CPU, start with `official`.

Expected Kendall tau (mean over validation graphs) on the synthetic `medium` data, and time on
one CPU core, for xla-random, xla-default, nlp-random and nlp-default:
  recommended               0.88, 0.85, 0.90 and 0.78 in 2 to 3 minutes
  full, 3 of 10 epochs      0.63, 0.69, 0.77 and 0.71 in 4 to 5 minutes
  official                  0.20, 0.52, 0.39 and 0.34 in 2 to 4 minutes
On the released AlexNet two epochs of `xla-default,full` reach 0.77 in 41 CPU seconds, and
`own,recommended` 0.60 (tau-b) on the test programs of `data/own` in half a minute.

  python run_layout.py --config=configs/layout.py:xla-random,recommended --workdir=out/best
  python run_layout.py --config=configs/layout.py:own,recommended --data_root=data/own/npz \
      --workdir=out/own
  python run_layout.py --config=configs/layout.py:xla-random --workdir=out/xla_random
  python run_layout.py --config=configs/layout.py:nlp-default,official --workdir=out/official
  python run_layout.py --config=configs/layout.py:xla-random,full --workdir=out/full
"""

from collections.abc import Iterable, Sequence

from ml_collections import ConfigDict

from tpugraphs_jax.run import configs

COLLECTIONS = ("xla-random", "xla-default", "nlp-random", "nlp-default")
# Graph Segment Training (GST): +E has a table of stale readouts, +D drops entries of the table,
# +F fine-tunes the head.
SEGMENTS = {
    "gst": dict(keep=1.0, recompute=True),
    "gst_e": dict(keep=1.0),
    "gst_ed": dict(keep=0.5),
    "gst_efd": dict(keep=0.5, finetune_epochs=30),
    "one": dict(keep=0.0),
}

# Variants with score tables, by the residual that a score adds to them.
TABLES = {"recommended": "none", "tables": "none", "tables+sage": "sage"}

PRESETS = configs.systems("layout")

VARIANTS = {
    **{name: "this collection; unless a variant names a model: GraphSAGE, graphs above 5,000 nodes "
             "in segments, with a table of stale readouts" for name in COLLECTIONS},
    "own": "the programs of data/own with their output orders; needs --data_root=data/own/npz",
    "own-NAME": "a collection of your own",
    "recommended": "for programs not in the training data: ScoreTables, on own data TrafficTables",
    "tables": "ScoreTables: costs of choices that a network computes once per program",
    "traffic": "TrafficTables: costs from padded bytes, for output orders on a TPU",
    "tables+sage": "ScoreTables and a GraphSAGE between groups for what such costs leave out",
    "official": "ResModel with the published settings",
    **configs.preset_variants(PRESETS),
    "gst_ed": "GraphSAGE, graphs above 1,000 nodes (the default: 5,000) in segments: a step has "
              "gradients of one; others count by stale readouts, each kept with probability 0.5",
    "full": "GraphSAGE on whole graphs",
    "gst": "as gst_ed, but other segments are recomputed without gradients",
    "gst_e": "as gst_ed, but all stale readouts are kept",
    "gst_efd": "as gst_ed, then trains the head alone on exact readouts",
    "one": "as gst_ed, but other segments are ignored",
    "ci": "a few seconds on a CPU",
}


def get_config(variant: str = "xla-random") -> ConfigDict:
  """The config of a comma-separated list of `VARIANTS`."""
  config = ConfigDict()
  config.task = "layout"
  config.seed = 0  # of parameters, batches and samples
  config.extensions = ()  # modules of your own that register models, losses, ... (see docs/)

  config.data = ConfigDict(dict(
      source="xla",  # or nlp; or own, with the collection's name in `search`
      search="random",  # or default
      also=(),  # layout collections whose graphs are trained on, too (see preset=fifth_all)
      features=("released",),  # blocks of node features
      config_features=("released",),  # 18 integers of a node; outputs: the 6 of its output
      store_dir="",  # random-access copy; empty = <data_root>/store
      skip_bad_files=False,  # leave out malformed files, by name, instead of stopping
      feature_transform="signed_log1p",  # of all columns, or by group: shape=log_offset(3),*=none
      config_transform="none",  # SAGE embeds the integers; ResModel wants minmax
      pad_value=-1,  # of unused layout positions; 0 = as released
      fit_splits=("train",),  # graphs whose nodes give the statistics of features, never labels
      fit_reduced=False,  # the statistics are of the nodes that `graph_reduction` keeps
      leave_out=(),  # training graphs whose names have one of these words
      skip_constant=True,  # leave out training graphs whose configurations or runtimes are equal
      duplicate_policy="min",  # keep, first, min, mean
      entropy_threshold=0.0,  # leaves out stretches of runtimes that hardly change; 0 = none
      max_configs=0,  # per training graph: thirds fastest, slowest, random; 0 = all
      graph_reduction="none",  # or config_neighborhood
      reduction_hops=5,  # from configurable nodes
      reduction_direction="both",  # operands, users, both
      reduction_induced="node",  # or edge
      virtual_node="none",  # output (fed by roots), or cluster
      cluster_nodes=1000,  # nodes that share a virtual node of a cluster
      loader_threads=1,  # that prepare batches; 0 = when one is asked for
      neighbour_slots=-1,  # width of neighbour tables; 0 = sorted segment sum; -1 = by platform
  ))
  config.batch = ConfigDict(dict(
      graphs=8,  # graphs per step, over all devices
      configs=16,  # configurations per graph and step
      min_configs=2,  # graphs with fewer are not trained on, nor part of statistics
      sampling="uniform",  # or skewed (to fast ones), uniform_replacement
      graph_sampling="uniform",  # sqrt, proportional: by configurations; every_config: each once
      target="ratio",  # official (runtime / 1e7 ns), absolute (ms), ratio or rank
      config_chunk=0,  # configurations through the model at a time (saves memory); 0 = all
      slates_per_epoch=1024,  # 0 = one per graph
      drop_remainder=True,  # leave out last slates of an epoch that do not fill a batch
      keep_nodes=5000,  # nodes of the sampled block of a graph, for ResModel's dropout
  ))
  config.model = ConfigDict(dict(
      name="SAGE", op_embed_dim=32, value_embed_dim=4, hidden_dim=64, num_gnns=3,
      # Of all or of configurable (config_) nodes: mean, max, sum (a hundredth of the sum).
      pooling=("mean", "config_mean", "config_max"),
      remat=False,  # recompute rounds in the backward pass instead of storing them
      dtype="float32",  # of the computation, or bfloat16
      precision="highest"))  # of matrix products
  config.loss = ConfigDict(dict(
      losses="ListMLELoss:1",  # NAME:WEIGHT,...
      normalize_weights=True,  # divide weights by their sum
      temperature=1.0,  # scores are divided by it in ListMLELoss
      kernel_l2=0.0,  # times the squares of weights, added to the loss
      activity_l2=0.0,  # times the squares of activations
      pair_reduction="own",  # of pairwise losses: items, pairs, sum, mean_all, mean_valid
      margin=0.0,  # of hinges; 0 = the loss's own
      score_norm_clip=0.0,  # largest L2 norm of a slate's scores; 0 = none
  ))
  config.optimizer = ConfigDict(dict(
      name="adamw",  # adam as in Keras; adamw decays weights
      learning_rate=3e-3,  # after the warm-up
      clip_norm_per_variable=0.0,  # largest L2 norm of each gradient; 0 = any
      clip_norm=1.0,  # largest L2 norm of all gradients together; 0 = any
      schedule="cosine",  # to final_learning_rate; constant, multistep (times milestone_factor)
      warmup_fraction=0.05,  # share of the run with a rate that grows from zero
      final_learning_rate=0.0,  # of cosine
      milestones=(),  # shares of the run at which multistep changes the rate
      milestone_factor=0.1,  # by which multistep multiplies the rate
      beta1=0.9,  # decay of Adam's mean of gradients
      beta2=0.999,  # decay of Adam's mean of squared gradients
      eps=1e-7,  # added to the root of Adam's mean of squared gradients
      weight_decay=1e-4,  # of adamw
      decay_layers=(),  # names of layers that decay; empty = all
      accumulation_steps=1,  # steps whose mean gradient makes one update
      average_decay=0.0,  # of a moving average of the parameters (EMA); 0 = none
      average_window=(),  # FIRST,LAST shares of the run with a plain mean of the parameters (SWA)
  ))
  config.train = ConfigDict(dict(
      epochs=10,  # at most
      eval_every_epochs=1,  # epochs between evaluations
      early_stop_epochs=0,  # epochs without a better evaluation that end the run; 0 = never
      best_metric="kendaltau",  # chooses the checkpoint
      result="best",  # or last: the checkpoint that a run ends with
      valid_sampling="fixed",  # judges a fixed sample; or slates, drawn anew each time
      valid_configs=200,  # of each graph in the fixed sample; 0 = all
      log_every_steps=20,  # steps between two lines of the log
      checkpoint_every_steps=0,  # for checkpoints between those after evaluations; 0 = none
      deterministic=False,  # on GPUs: two runs are alike, bit for bit, but sums take longer
      quick_compile=False,  # on CPUs: half the time, but steps take two to three times as long
  ))
  config.eval = ConfigDict(dict(
      graphs=1,  # per device and scoring call
      configs=100,  # per graph and scoring call
      permutations=1,  # orders of configurations averaged over, for models that see slates
      indices_dir="",  # published validation indices; empty = all or max_configs
      max_configs=1000,  # per validation graph, a seeded sample; 0 = all
  ))
  config.profile_steps = ""  # FIRST:LAST writes a trace of these steps

  names = ["own-outputs" if name == "own" else name for name in variant.split(",") if name]
  own = [name for name in names if name.startswith("own-")]
  names, chosen = configs.take_preset(PRESETS, names, "configs/layout.py")
  for name in names:
    if name not in (*COLLECTIONS, *own, *SEGMENTS, "full", "official", "traffic", *TABLES, "ci"):
      raise ValueError(configs.no_variant(name, "layout.py"))
  collection = _only((*COLLECTIONS, *own), names)
  if collection:
    config.data.source, config.data.search = collection.split("-", 1)
  ranker = _only(("official", "traffic", *TABLES), names)
  in_segments = chosen.in_segments if chosen else not ranker
  named = _only((*SEGMENTS, "full"), names)
  segments = named or in_segments * "gst_ed"
  if ranker == "recommended" and config.data.source == "own":
    ranker = "traffic"
  if ranker == "official":
    _official(config)
  elif ranker == "traffic":
    _traffic(config)
  elif ranker:
    _tables(config, TABLES[ranker])
  if segments in SEGMENTS:
    _segments(config, **SEGMENTS[segments])
    if not (named or chosen):  # smaller segments cost quality where whole programs fit
      config.segments.max_nodes = 5000
  if chosen:
    chosen.apply(config)
  if "ci" in names:
    _shrink(config)
    if chosen:
      chosen.shrink(config)
  return config


def _only(known: Iterable[str], names: Sequence[str]) -> str:
  """The `known` variant that is among `names`, or an empty string if there is none."""
  chosen = [name for name in known if name in names]
  if len(chosen) > 1:
    raise ValueError(f"configs/layout.py takes one of the variants {' and '.join(chosen)}")
  return chosen[0] if chosen else ""


def _official(config: ConfigDict) -> None:
  """ResModel as published: features, sampling, loss and optimiser of the baseline."""
  config.data.update(feature_transform="minmax", config_transform="minmax", pad_value=0,
                     duplicate_policy="keep", skip_constant=False)
  config.batch.update(graphs=8, configs=16, min_configs=16, sampling="skewed",
                      target="official", slates_per_epoch=0, drop_remainder=False)
  config.model = ConfigDict(dict(
      name="ResModel", op_embed_dim=32, hidden_dim=32, num_gnns=2, adj_normalization="sym",
      dropout="backpropdropout", remat=False, dtype="float32", precision="highest"))
  config.loss.update(kernel_l2=1e-4, activity_l2=1e-4)
  config.optimizer.update(name="adam", learning_rate=1e-3, clip_norm_per_variable=1e-2,
                          clip_norm=0.0, schedule="constant", warmup_fraction=0.0,
                          weight_decay=0.0)
  config.train.update(epochs=50, early_stop_epochs=25, best_metric="opa", valid_sampling="slates")
  config.eval.update(configs=500)


def _tables(config: ConfigDict, residual: str) -> None:
  """ScoreTables on large slates: its network runs once per graph, whatever their size."""
  config.data.pair_hops = 6  # most edges between two nodes whose layouts have a joint cost
  config.data.tile_padding = True  # features: how layouts fill the 8 x 128 tiles of a TPU
  config.batch.update(graphs=4, configs=256, slates_per_epoch=400)
  config.model = ConfigDict(dict(
      name="ScoreTables", op_embed_dim=16, hidden_dim=32, num_gnns=4,
      pairs="low_rank",  # or none: costs of single choices alone
      residual=residual,  # beyond the tables: none, triples, sage
      by_bytes=True,  # costs have a part that grows with the bytes of tensors
      rank=8, heads=1, dropout=0.0, dtype="float32", precision="highest"))
  config.optimizer.update(weight_decay=1e-2)


def _traffic(config: ConfigDict) -> None:
  """TrafficTables: costs of single choices from padded bytes, for about a hundred programs."""
  _tables(config, "none")
  config.data.pair_hops = 1  # no pairs have costs
  config.batch.update(graphs=32, configs=16, slates_per_epoch=2560)
  config.model = ConfigDict(dict(
      name="TrafficTables", hidden_dim=16, dropout=0.3, dtype="float32", precision="highest"))
  config.loss.losses = "CostLogisticLoss:1"
  config.optimizer.update(learning_rate=1e-2, weight_decay=0.1)
  config.train.epochs = 5


def _segments(
    config: ConfigDict, *, keep: float, recompute: bool = False, finetune_epochs: int = 0
) -> None:
  """Trains on segments of a graph; see `tpugraphs_jax/rankers/segments/family.py`."""
  config.task = "segments"
  config.batch.drop_remainder = True
  config.segments = ConfigDict(dict(
      partition="contiguous",  # published (borders of GST), or metis
      max_nodes=1000,  # of a segment
      fresh=1,  # segments per graph and step with gradients
      keep=keep,  # probability that another segment counts; 0 = no table
      keep_unit="segment",  # kept or dropped for a whole slate; entry: for each configuration
      recompute=recompute,  # other segments without gradient instead of from a table
      readout="embedding",  # or scalar: the head scores every segment
      aggregation="mean",  # of segments, or sum
      history_dtype="float32",  # or bfloat16
  ))
  config.segments.finetune = ConfigDict(dict(
      epochs=finetune_epochs,  # of the head alone, after train.epochs
      configs=0,  # per graph to compute readouts of; 0 = all
      optimizer=ConfigDict(config.optimizer.to_dict() | dict(
          name="adamw", learning_rate=2e-3, schedule="cosine", warmup_fraction=0.05,
          weight_decay=1e-4, clip_norm=1.0, clip_norm_per_variable=0.0))))
  if config.model.name == "ResModel":
    config.model.dropout = "fullgraph"  # segments take the place of its blocks
  config.eval.graphs = 4  # segments, which are small, per device and scoring call


def _shrink(config: ConfigDict) -> None:
  config.train.quick_compile = True
  if "hidden_dim" in config.model and config.model.name != "TrafficTables":
    config.model.update(op_embed_dim=8, hidden_dim=16)
  config.batch.update(graphs=4, configs=8, slates_per_epoch=16, min_configs=4, keep_nodes=100)
  config.train.update(epochs=2, valid_configs=50, log_every_steps=4)
  if "segments" in config:
    config.segments.max_nodes = 60
