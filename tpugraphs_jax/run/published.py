"""Published systems as settings of one ranker: `preset=NAME` in `configs/layout.py` and `tile.py`.

A preset changes a config of its file. Its docstring says which settings were published, and
which are different here. Common to all: dropout leaves out the same features for every
configuration of a node; a pooling `sum` is a hundredth of the sum; Adam's epsilon is 1e-7
unless a docstring names it (the default of PyTorch, which most systems used, is 1e-8); numbers
are float32; runs are as long as the config file says, since published ones take hours on GPUs.
The systems are those of the competition "Fast or Slow?" by place, but for `gst`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from ml_collections import ConfigDict

from tpugraphs_jax.rankers.composed.options import Options
from tpugraphs_jax.rankers.composed.ranker import NAME

Preset = Callable[[ConfigDict], None]
MODELS = (NAME, "BilinearEdges")  # those of presets


def composed(config: ConfigDict, **options: Any) -> None:
  """Gives a config the composed ranker with all of its options as fields."""
  fields = dict(name=NAME) | dataclasses.asdict(
      Options(**{"dtype": "float32", "precision": "highest"} | options))
  config.model = ConfigDict(fields)


def optimizer(config: ConfigDict, **changes: Any) -> None:
  """The plain optimiser, AdamW without decay, clipping or warm-up, with some changes."""
  config.optimizer.update(dict(
      name="adamw", learning_rate=1e-3, schedule="constant", warmup_fraction=0.0,
      weight_decay=0.0, clip_norm=0.0, clip_norm_per_variable=0.0, final_learning_rate=0.0,
      average_decay=0.0) | changes)


def loss(config: ConfigDict, losses: str, **changes: Any) -> None:
  """A loss without regularisation."""
  config.loss.update(
      dict(losses=losses, temperature=1.0, kernel_l2=0.0, activity_l2=0.0) | changes)


def shrink(config: ConfigDict) -> None:
  """A preset of a few seconds: narrow layers, of which no more than two of a kind are left."""
  model = config.model
  for name in [name for name in model if name.endswith("widths")]:
    model[name] = (8,) * min(len(model[name]), 2)
  limits = dict(op_embed_dim=8, feature_width=8, position_width=8, attention_keys=8,
                dimension_width=8, dimension_layers=1, decoder_layers=1, attention_from=1)
  for name, limit in limits.items():
    if name in model:
      model[name] = min(model[name], limit)
  config.batch.update(graphs=4, configs=8, slates_per_epoch=16, min_configs=4)
  config.optimizer.accumulation_steps = 1
  config.train.update(epochs=2, valid_configs=50, log_every_steps=4)
  config.eval.configs = 8


def gst(config: ConfigDict) -> None:
  """Graph Segment Training of TpuGraphs (arXiv 2305.12322, public code).

  Published: three SAGE rounds of width 256 without activations between them (kept:
  `conv_activation=none`; `same` repairs it), users' messages alone, opcode and
  configuration times learned factors from 100 on, the mean plus the maximum of nodes at
  length 1, a score per segment, and stale scores kept with probability 0.5.

  Here the two linear layers in front without an activation between them (of width 128 and 256)
  are one, the weight decay is left out, and stale scores go to their own configurations, which
  in the published code hold for two segments only. The configs' segments are those of the
  variant `gst_ed`.
  """
  config.data.update(feature_transform="standardize", config_transform="none", pad_value=0,
                     duplicate_policy="keep")
  config.batch.update(graphs=32, configs=32, sampling="uniform_replacement")
  composed(
      config, op_embed_dim=128, op_max_norm=1.0, op_gain=100.0, encoding="gain",
      encoding_scale=100.0, pre_widths=(256,), widths=(256,) * 3, edge_direction="backward",
      dropout=0.1, dropout_in=("first",), activation="prelu", conv_activation="none",
      pooling=("mean", "max"), pooling_merge="sum", readout_norm="l2", head_widths=(256,))
  loss(config, "SumHingeLoss:1")
  optimizer(config, name="adam", learning_rate=1e-4, schedule="cosine")
  if "segments" in config:
    config.segments.update(readout="scalar", aggregation="sum", keep_unit="entry")


def seventh(config: ConfigDict) -> None:
  """7th place: Graph Segment Training with an activation between its rounds.

  Published: that it began with the code of Graph Segment Training, samples segments to save
  memory, and has models of its own by edge and by the shape of nodes; tiles are ranked by the
  official model, the default of `configs/tile.py`. There is no code. Here it is `gst` with the
  known slip of that code repaired: three rounds without an activation between them, which are
  one linear map. Its models by edge and by shape are missing.
  """
  gst(config)
  config.model.conv_activation = "same"


def first(config: ConfigDict) -> None:
  """1st place: attention across configurations, instance norm, one hop around choices.

  Published: two linear and two SAGE layers of width 256, instance norm, channel
  attention, layout integers through one embedding with -2 for what is not configurable;
  in the default collections a softmax over the configurations of the slate. A graph per
  step, 64 configurations of it (128 in random collections), mean over ten orders.

  Here validation has slates of the size of training (published: 128 or 256 where training
  has 64), and a node's own layout also stays among the scaled numbers. Lists of dimensions are
  marked behind their ends as far as released files tell these (block `padded`).
  """
  across = config.data.search == "default"
  configs = 64 if across else 128
  config.data.update(
      features=("padded", "node_layout"), feature_transform="node_layout=none,*=standardize",
      config_transform="none", duplicate_policy="first",
      graph_reduction="config_neighborhood", reduction_hops=1, reduction_direction="both",
      reduction_induced="edge")
  config.batch.update(graphs=1, configs=configs)
  config.eval.update(configs=configs, permutations=10)
  composed(
      config, op_embed_dim=16, encoding="embedding", missing="sentinel", node_layout=True,
      pre_widths=(256, 256), widths=(256, 256), edge_direction="backward", activation="gelu",
      norm="instance", norm_position="pre", residual="identity", dropout=0.2,
      dropout_in=("layers",), channel_attention=8,
      config_attention="softmax_gate" if across else "none")
  loss(config, "PairwiseHingeLoss:1", pair_reduction="mean_all")
  optimizer(config, weight_decay=1e-5, schedule="cosine", warmup_fraction=0.05, clip_norm=1.0)


def third(config: ConfigDict) -> None:
  """3rd place: linear attention beside SAGE in both directions, positions on a track of their own.

  Published: 246 features of which many are made, random-walk features on a track of width
  64, a virtual node fed by all roots, four layers of 384 and 256 channels with attention
  without a normaliser; configurations divided by 5; sums over nodes; summed hinges; every
  configuration once per epoch, so that graphs count by their configurations.

  Here the features of protobufs (`extra`) are left out, which few collections have, the
  layers of a convolution behind its directions are one less, and directions are added
  with weights in the right normalisation (the published one divides by the wrong end). Made
  features and walks of the virtual node are 0 (published: its own walks). The
  logarithm of 43 released columns is signed (published: log(x + 1), which is no number below
  -1). Left and right operands are told apart by shapes, where these do (published: by protobufs).
  """
  config.data.update(
      features=("wide_logarithms", "operand_shapes", "tile_modulo", "random_walk"),
      feature_transform="operand_shapes=log_offset(3),*=none",
      config_transform="none", pad_value=0, duplicate_policy="keep", virtual_node="output")
  config.batch.update(graphs=4, configs=16, graph_sampling="proportional")
  composed(
      config, op_embed_dim=128, encoding_scale=0.2, position_width=64, pre_widths=(512,),
      widths=(384, 256, 256, 256), post_widths=(256, 256), activation="silu", norm="layer",
      norm_position="after_activation", global_attention="linear", attention_keys=128,
      attention_normalize=False, attention_combine="concat", pooling=("sum",))
  loss(config, "PairwiseHingeLoss:1", pair_reduction="sum")
  optimizer(config, name="adam", schedule="cosine", final_learning_rate=1e-6, clip_norm=1.0)


def fourth(config: ConfigDict) -> None:
  """4th place: edges at configurable nodes through bilinear pooling, no message passing.

  Published: 12 node features of both ends, 8 of the 18 configuration values, and ranks as
  the target. Here all features and values are in it: which ones were chosen is unknown,
  and so are loss and optimiser, for which ListMLE and AdamW stand.
  """
  config.data.update(feature_transform="standardize", config_transform="none",
                     graph_reduction="config_neighborhood", reduction_hops=1,
                     reduction_direction="operands", reduction_induced="edge")
  config.batch.update(graphs=4, configs=32, target="rank")
  config.model = ConfigDict(dict(
      name="BilinearEdges", op_embed_dim=10, edge_widths=(1024, 128), config_widths=(1024, 128),
      head_widths=(1024,), config_scale=1.0, dtype="float32", precision="highest"))
  loss(config, "ListMLELoss:1")
  optimizer(config, schedule="cosine", clip_norm=1.0)


def sixth(config: ConfigDict) -> None:
  """6th place: five hops of users, instance norm, a head that normalises across the slate.

  Published: four SAGE layers of 256 channels with residuals and instance norm, mean plus
  maximum at length 1, slates of 80 (NLP), 32 and 100 configurations, 32 of them per
  update by accumulation, averaged weights, every configuration once per epoch, one dropout
  behind the first linear layer. The norm across the slate comes from a norm
  over the first axis of a matrix; `head_norm=none` leaves it out. Here the window of
  averaging is the second half of the run (published: chosen by hand), and runs begin with
  fresh parameters and fixed scales of features (published: for random XLA layouts with those of
  NLP, and with scales that are trained). `sixth_gin` is the other half of its ensemble.
  """
  nlp = config.data.source == "nlp"
  configs = 80 if nlp else 32 if config.data.search == "default" else 100
  config.data.update(
      feature_transform="standardize", config_transform="none", pad_value=0,
      duplicate_policy="keep", graph_reduction="config_neighborhood", reduction_hops=5,
      reduction_direction="users", reduction_induced="node")
  config.batch.update(graphs=1, configs=configs, graph_sampling="proportional")
  config.eval.configs = configs
  composed(
      config, op_embed_dim=128, op_max_norm=1.0, dropout_in=("first",),
      pre_widths=(256, 256), widths=(256,) * 4,
      edge_direction="backward", activation="gelu", norm="instance", residual="identity",
      dropout=0.2, pooling=("mean", "max"), pooling_merge="sum", readout_norm="l2",
      head_widths=(256, 128), head_norm="configuration")
  loss(config, "PairwiseLogisticLoss:1", pair_reduction="pairs")
  optimizer(config, learning_rate=5e-4, weight_decay=1e-2, accumulation_steps=32,
            average_window=(0.5, 1.0))


def sixth_gin(config: ConfigDict) -> None:
  """6th place, default XLA layouts: `sixth` with GIN, whose layers are all read out.

  Published: one linear layer with GELU, then four GIN layers whose MLPs are twice a linear
  layer, the instance norm and ELU; the means over nodes after every layer are added, and the
  head of `sixth` scores the sum. Its scores are added to those of `sixth`. The published fourth
  layer reads the second instead of the third, which is not repeated here.
  """
  sixth(config)
  config.model.update(
      pre_widths=(256,), conv="gin", conv_activation="elu", residual="none", pooling=("mean",),
      readout_norm="none", readout_layers="all")


def tenth(config: ConfigDict) -> None:
  """10th place: a transformer over nodes that runs once for all configurations.

  Published: twelve blocks of linear attention and APPNP of width 256 on nodes alone, then
  configurable nodes with each configuration through an MLP, pooled and scored; ListMLE
  over 256 to 1000 configurations. On NLP its members are four to six layers of DIFFormer
  (here: five). How a layer of DIFFormer joins its input, here by a gate, and that APPNP follows in
  it, are guesses, as are heads, steps of propagation and the width of the MLP. Columns with
  numbers of -3 and less have a signed logarithm instead of log(x + 3).
  """
  config.data.update(
      feature_transform="window=signed_log1p,padding=signed_log1p,slice=signed_log1p,"
                        "*=log_offset(3)",
      config_transform="none")
  config.batch.update(graphs=1, configs=256)
  config.eval.configs = 256
  composed(
      config, op_embed_dim=64, pre_widths=(256,), widths=(256,) * 12, conv="appnp",
      appnp_steps=4, heads=4, activation="gelu", norm="layer", norm_position="pre",
      residual="identity", residual_position="after_activation", global_attention="linear",
      attention_combine="serial", fusion="middle", fusion_widths=(256, 256),
      pooling=("mean",))
  if config.data.source == "nlp":
    config.model.update(widths=(256,) * 5, global_attention="difformer", residual="gated")
  loss(config, "ListMLELoss:1")
  optimizer(config, learning_rate=5e-4, weight_decay=1e-2, schedule="cosine")


def tile_first(config: ConfigDict) -> None:
  """1st place, tiles: the layout model without configurations, beside an MLP of the tile.

  Published: all configurations of a kernel per step; the attention across configurations
  is on, where it only doubles features: configurations are not in the encoder. Here a
  slate has at most 64 configurations, that attention is left out, and layouts are numbers.
  """
  config.data.update(feature_transform="standardize", config_transform="standardize")
  config.batch.update(graphs=1, configs=64, target="official")
  composed(
      config, op_embed_dim=16, pre_widths=(256, 256), widths=(256, 256),
      edge_direction="backward", activation="gelu", norm="instance", norm_position="pre",
      residual="identity", dropout=0.2, dropout_in=("layers", "fusion", "head"),
      channel_attention=8, fusion="late",
      fusion_widths=(256, 256), pooling=("mean", "max"), head_widths=(256, 256))
  loss(config, "PairwiseHingeLoss:1", pair_reduction="mean_all")
  optimizer(config, weight_decay=1e-5, schedule="cosine", warmup_fraction=0.05, clip_norm=1.0)


def tile_third(config: ConfigDict) -> None:
  """3rd place, tiles: four SAGE layers with layer norm, the inverse logarithm of hinges.

  Published: 16 columns of directed random walks and a virtual node fed by all roots, which
  has walks of its own (here: 0). Here features are standardised behind a signed logarithm.
  """
  config.data.update(
      features=("released", "directed_walk"), virtual_node="output",
      feature_transform="directed_walk=none,*=signed_log1p", config_transform="signed_log1p")
  config.batch.update(graphs=16, configs=16)
  composed(config, op_embed_dim=32, pre_widths=(256,), widths=(128,) * 4,
           edge_direction="forward", activation="silu", norm="layer",
           norm_position="after_activation", pooling=("sum",))
  loss(config, "InverseLogHingeLoss:1")
  optimizer(config, name="adam", schedule="cosine", final_learning_rate=1e-6, clip_norm=1.0)


def tile_sixth(config: ConfigDict) -> None:
  """6th place, tiles: GATv2 on kernels, the tile beside mean and maximum.

  Published: four GATv2 layers of 256 channels and one head with instance norm, ListMLE on
  32 slates of 64 configurations, a head that normalises across the slate.
  """
  config.data.update(feature_transform="standardize", config_transform="standardize")
  config.batch.update(graphs=32, configs=64)
  config.eval.configs = 64
  composed(
      config, op_embed_dim=128, op_max_norm=1.0, conv="gatv2", pre_widths=(256, 256),
      widths=(256,) * 4, edge_direction="backward", activation="gelu", norm="instance",
      fusion="late", fusion_widths=(), pooling=("mean", "max"), pooling_merge="sum",
      head_widths=(256, 128),
      head_norm="configuration")
  loss(config, "ListMLELoss:1")
  optimizer(config, learning_rate=5e-4, weight_decay=1e-2, average_window=(0.5, 1.0))


def tile_tenth(config: ConfigDict) -> None:
  """10th place, tiles: configurations ask the nodes of their kernel.

  Published: eight graph blocks, two of self-attention, four of cross-attention with
  configurations as queries. Here self-attention is serial in the last two of the eight,
  graph blocks are SAGE, and widths, heads and slates are guesses.
  """
  config.data.update(feature_transform="signed_log1p", config_transform="signed_log1p")
  config.batch.update(graphs=16, configs=32)
  composed(
      config, op_embed_dim=64, pre_widths=(128,), widths=(128,) * 8, heads=4, activation="gelu",
      norm="layer", norm_position="pre", residual="identity",
      residual_position="after_activation", global_attention="softmax",
      attention_combine="serial", attention_from=6, fusion="cross", fusion_widths=(128, 128),
      decoder_layers=4)
  loss(config, "ListMLELoss:1")
  optimizer(config, learning_rate=5e-4, weight_decay=1e-2, schedule="cosine")


def mlsys21(
    config: ConfigDict, *, fusion: bool = False, work: bool = False, **options: Any) -> None:
  """"A Learned Performance Model for TPUs" (MLSys 2021): SAGE, sums, means and maxima of nodes.

  Published: opcode embedding, node scalars and tile on every node, GraphSAGE, a reduction
  over nodes, rank loss of tiles or squared error of log runtimes. Variants of the paper:
  `_per_node`, `_lstm`, `_transformer` (reductions), `_gat` and `_fusion` (absolute
  runtimes, in milliseconds; the drift of the machine is taken out, see
  `TileConfigs.unit_ns`). Widths are guesses; edges count alike in both directions. The
  paper's optional estimates of a kernel's work (operations, bytes read and written,
  transcendental functions) are no part of the data set: `_work` has estimates from shapes
  (block `kernel_work`) on every node.
  """
  blocks = ("released", "kernel_work") if work else ("released",)
  config.data.update(features=blocks, config_transform="minmax", feature_transform=
                     "kernel_work=signed_log1p,*=minmax" if work else "minmax")
  config.batch.update(graphs=10, configs=10, target="absolute" if fusion else "official")
  composed(config, **dict(
      op_embed_dim=64, pre_widths=(64,), widths=(64,) * 3, edge_direction="symmetric",
      pooling=("sum", "mean", "max"), head_widths=(64,)) | options)
  loss(config, "LogMSE:1" if fusion else "RankHingeLoss:1")
  optimizer(config, name="adam", clip_norm=1.0)


def mlsys21_per_node(config: ConfigDict) -> None:
  """mlsys21 with a score per node."""
  mlsys21(config, readout="node_scalar_sum", head_widths=())


def mlsys21_lstm(config: ConfigDict) -> None:
  """mlsys21 with an LSTM over nodes in order."""
  mlsys21(config, readout="lstm")


def mlsys21_transformer(config: ConfigDict) -> None:
  """mlsys21 with a transformer over nodes."""
  mlsys21(config, readout="transformer", heads=4, pooling=("sum",))


def mlsys21_gat(config: ConfigDict) -> None:
  """mlsys21 with graph attention."""
  mlsys21(config, conv="gatv2", heads=4)


def mlsys21_work(config: ConfigDict) -> None:
  """mlsys21 with estimates of a kernel's work."""
  mlsys21(config, work=True)


def mlsys21_fusion(config: ConfigDict) -> None:
  """mlsys21 with the error of log runtimes."""
  mlsys21(config, fusion=True)


def mlsys21_fusion_work(config: ConfigDict) -> None:
  """mlsys21 with the error of log runtimes and estimates of a kernel's work."""
  mlsys21(config, fusion=True, work=True)


SEGMENTED = (gst, seventh)  # on segments of graphs unless a config says otherwise
LAYOUTS: dict[str, Preset] = {
    "gst": gst, "seventh": seventh, "first": first, "third": third, "fourth": fourth,
    "sixth": sixth, "sixth_gin": sixth_gin, "tenth": tenth}
TILES: dict[str, Preset] = {
    "first": tile_first, "third": tile_third,
    "sixth": tile_sixth, "tenth": tile_tenth, "mlsys21": mlsys21,
    "mlsys21_per_node": mlsys21_per_node, "mlsys21_lstm": mlsys21_lstm,
    "mlsys21_transformer": mlsys21_transformer, "mlsys21_gat": mlsys21_gat,
    "mlsys21_work": mlsys21_work, "mlsys21_fusion": mlsys21_fusion,
    "mlsys21_fusion_work": mlsys21_fusion_work}
