"""Tile rankers: the official baseline's models, recommended settings and published systems.

Variants are in `VARIANTS`, separated by commas. The default and the models of the official
baseline have its published settings; docs/parity.md says what agrees and what differs. Other
variants also train on kernels with fewer than 10 configurations.

Expected top-5 slowdown (mean over validation kernels) on the synthetic `medium` data, on one
CPU core: 0.040 in 3 minutes with the published settings, 0.001 in 3 minutes with `recommended`.

  python run_tile.py --config=configs/tile.py:LateJoinSAGE --workdir=out/late
  python run_tile.py --config=configs/tile.py:recommended --workdir=out/recommended
  python run_tile.py --config=configs/tile.py --config.optimizer.learning_rate=0.01 ...
"""

from ml_collections import ConfigDict

from tpugraphs_jax.run import configs

_MODELS = {  # reduction over nodes: sum or mean, neither scaled
    "EarlyJoinSAGE": dict(op_embed_dim=64, hidden_dim=64, num_gnns=3, reduction="sum"),
    "LateJoinSAGE": dict(op_embed_dim=64, hidden_dim=64, num_gnns=3, reduction="sum"),
    "EarlyJoinResGCN": dict(
        op_embed_dim=32, hidden_dim=64, num_gnns=3, directed=False, reduction="sum"),
    "LateJoinResGCN": dict(
        op_embed_dim=32, hidden_dim=64, num_gnns=3, directed=False, reduction="sum"),
    "MLP": dict(op_embed_dim=32, hidden_dim=64, num_layers=2),
}

PRESETS = configs.systems("tile")

VARIANTS = {
    **{name: "the official baseline's model of this name, published settings" for name in _MODELS},
    "recommended": "EarlyJoinSAGE with features of how tiles cut arrays, best settings found",
    **configs.preset_variants(PRESETS),
    "own-NAME": "a collection of your own",
    "ci": "a few seconds on a CPU",
}


def get_config(variant: str = "EarlyJoinSAGE") -> ConfigDict:
  """The config of a comma-separated list of `VARIANTS`."""
  config = ConfigDict()
  config.task = "tile"
  config.seed = 0  # of parameters, batches and samples
  config.extensions = ()  # modules of your own that register models, losses, ... (see docs/)

  config.data = ConfigDict(dict(
      source="xla",  # or own, with the collection's name in `search`
      search="",  # name of a collection of your own
      features=("released",),  # blocks of node features
      skip_bad_files=False,  # leave out malformed files, by name, instead of stopping
      feature_transform="minmax",  # of all columns, or by group: shape=log_offset(3),*=minmax
      config_features=("released",),  # blocks of configuration features: released, tile_counts
      config_transform="minmax",
      pad_value=0,  # -1 marks unused layout positions
      duplicate_policy="keep",  # first, min, mean: one of several equal tiles of a training kernel
      virtual_node="none",  # output (fed by roots), or cluster
      cluster_nodes=1000,  # nodes that share a virtual node of a cluster
      loader_threads=0,  # that prepare batches; 0 = when one is asked for
      neighbour_slots=-1,  # width of neighbour tables; 0 = sorted segment sum; -1 = by platform
  ))
  config.batch = ConfigDict(dict(
      graphs=10,  # kernels per step, over all devices
      configs=10,  # configurations per kernel and step
      min_configs=10,  # kernels with fewer are not trained on, nor part of statistics
      sampling="uniform",  # or skewed (to fast ones), uniform_replacement
      graph_sampling="uniform",  # sqrt, proportional: by configurations; every_config: each once
      target="official",  # runtime / normalizer; or absolute (ms), ratio, rank
      config_chunk=0,  # configurations through the model at a time (saves memory); 0 = all
      slates_per_epoch=0,  # 0 = one per kernel
      drop_remainder=True,  # leave out last slates of an epoch that do not fill a batch
  ))
  config.model = ConfigDict(dict(
      name="EarlyJoinSAGE", **_MODELS["EarlyJoinSAGE"],
      dtype="float32",  # of the layers before the readout, or bfloat16
      precision="highest",  # of matrix products; default lets TPU and GPU round inputs
  ))
  config.loss = ConfigDict(dict(
      losses="ListMLELoss:1,MSE:0.02",  # NAME:WEIGHT,...
      normalize_weights=True,  # divide weights by their sum
      temperature=10.0,  # scores are divided by it in ListMLELoss
      kernel_l2=1e-4,  # times the squares of weights, added to the loss
      activity_l2=1e-4,  # times the squares of activations
      pair_reduction="own",  # of pairwise losses: items, pairs, sum, mean_all, mean_valid
      margin=0.0,  # of hinges; 0 = the loss's own
      score_norm_clip=0.0,  # largest L2 norm of a slate's scores; 0 = none
  ))
  config.optimizer = ConfigDict(dict(
      name="adam",  # adam as in Keras; adamw decays weights
      learning_rate=1e-3,  # after the warm-up
      clip_norm_per_variable=1e-3,  # largest L2 norm of each gradient; 0 = any
      clip_norm=0.0,  # largest L2 norm of all gradients together; 0 = any
      schedule="constant",  # cosine (to final_learning_rate), multistep (times milestone_factor)
      warmup_fraction=0.0,  # share of the run with a rate that grows from zero
      final_learning_rate=0.0,  # of cosine
      milestones=(),  # shares of the run at which multistep changes the rate
      milestone_factor=0.1,  # by which multistep multiplies the rate
      beta1=0.9,  # decay of Adam's mean of gradients
      beta2=0.999,  # decay of Adam's mean of squared gradients
      eps=1e-7,  # added to the root of Adam's mean of squared gradients
      weight_decay=0.0,  # of adamw
      decay_layers=(),  # names of layers that decay; empty = all
      accumulation_steps=1,  # steps whose mean gradient makes one update
      average_decay=0.0,  # of a moving average of the parameters (EMA); 0 = none
      average_window=(),  # FIRST,LAST shares of the run with a plain mean of the parameters (SWA)
  ))
  config.train = ConfigDict(dict(
      epochs=100,  # at most
      eval_every_epochs=1,  # epochs between evaluations
      early_stop_epochs=20,  # epochs without a better evaluation that end the run; 0 = never
      best_metric="opa",  # chooses the checkpoint
      result="best",  # or last: the checkpoint that a run ends with
      valid_sampling="slates",  # judges slates drawn anew each time; or a fixed sample
      valid_configs=256,  # of each kernel in the fixed sample; 0 = all
      log_every_steps=100,  # steps between two lines of the log
      checkpoint_every_steps=0,  # for checkpoints between those after evaluations; 0 = none
      deterministic=False,  # on GPUs: two runs are alike, bit for bit, but sums take longer
      quick_compile=False,  # on CPUs: half the time, but steps take two to three times as long
  ))
  config.eval = ConfigDict(dict(
      graphs=8,  # per device and scoring call
      configs=64,  # per graph and scoring call
      permutations=1,  # orders of configurations averaged over, for models that see slates
  ))
  config.profile_steps = ""  # FIRST:LAST writes a trace of these steps

  names, chosen = configs.take_preset(PRESETS, variant.split(","), "configs/tile.py")
  if chosen:
    _unofficial(config)
    chosen.apply(config)
  for name in filter(None, names):
    if name in _MODELS:
      kept = {option: config.model[option] for option in ("dtype", "precision")}
      config.model = ConfigDict(dict(name=name, **_MODELS[name], **kept))
    elif name == "recommended":
      _recommended(config)
    elif name.startswith("own-"):
      config.data.source, config.data.search = name.split("-", 1)
    elif name == "ci":
      _shrink(config)
      if chosen:
        chosen.shrink(config)
    else:
      raise ValueError(configs.no_variant(name, "tile.py"))
  return config


def _unofficial(config: ConfigDict) -> None:
  """Trains on kernels with few configurations too, and judges checkpoints by a fixed sample."""
  config.batch.min_configs = 2
  config.train.valid_sampling = "fixed"


def _recommended(config: ConfigDict) -> None:
  """Log features, counts of how tiles cut arrays, ListMLE on larger slates, averaged parameters."""
  config.data.update(feature_transform="signed_log1p", config_transform="signed_log1p",
                     config_features=("released", "tile_counts"))
  _unofficial(config)
  config.batch.configs = 16
  config.loss.update(losses="ListMLELoss:1", temperature=1.0, kernel_l2=0.0, activity_l2=0.0)
  config.optimizer.update(
      learning_rate=2e-3, clip_norm_per_variable=0.0, clip_norm=1.0, schedule="cosine",
      warmup_fraction=0.05, average_decay=0.99)
  config.train.update(epochs=30, early_stop_epochs=0, eval_every_epochs=3)


def _shrink(config: ConfigDict) -> None:
  config.train.quick_compile = True
  if "hidden_dim" in config.model:
    config.model.update(op_embed_dim=8, hidden_dim=16)
  _unofficial(config)
  config.batch.update(configs=6, slates_per_epoch=40)
  config.train.update(epochs=5, log_every_steps=4)
