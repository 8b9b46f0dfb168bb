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

from tpugraphs_jax.collections import RELEASED
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


def fifth(config: ConfigDict) -> None:
  """5th place: both directions side by side, own layouts overridden, pairs across graphs.

  Published: one model for the four layout collections and tiles, three SAGE layers of 384
  channels, hinges within and across graphs in equal parts, graphs as often as the root of
  their configurations, DropEdge up to 0.15; own layouts of nodes stand in for configurations
  that nodes do not have; numbers of dimensions are one-hot by dimension. Here a run is of one
  collection (`fifth_all` is of all); a preset of the same name is in `configs/tile.py`. Large
  numbers have a signed logarithm (published: one with an offset per column, which is the same
  where nothing is below 0). Of other columns, strides and numbers of parameters have one, and
  counts of groups none (published: the other way round). The rest lies in [0, 1] (published:
  [-1, 1]). In own layouts dimension 0 stays 0 (published: -1, as where a node has no dimension).
  """
  config.data.update(
      features=("released", "named_dimensions", "node_layout"), config_transform="none",
      duplicate_policy="keep",
      feature_transform="node_layout=none,named_dimensions=none,convolution=left_out,"
                        "layout=left_out,shape=signed_log,window=signed_log,slice=signed_log,"
                        "padding=signed_log,*=minmax")
  config.batch.update(graphs=4, configs=8, graph_sampling="sqrt", target="absolute")
  composed(
      config, op_embed_dim=64, merge_unary=True, missing="layout",
      pre_widths=(384,), widths=(384,) * 3, direction_merge="concat", pooling=("sum",),
      drop_edge=0.15)
  loss(config, "PairwiseHingeLoss:1,CrossHingeLoss:1", pair_reduction="mean_all", margin=1.0)
  optimizer(config, learning_rate=1e-4, weight_decay=1e-2, schedule="cosine", clip_norm=1.0)


def fifth_all(config: ConfigDict) -> None:
  """5th place: `fifth` as one network for all layout collections and tiles.

  Nodes of a kernel have the layout -1 in place of a configuration, nodes of a program have no
  tile. A step is of one collection, and node features have one transform, fitted on all of
  them. Here each collection has as many steps (published: as the roots of the numbers of its
  configurations say), kernels come in slates like those of programs (published: 128 slates of
  32) with the same margin of 1 (published: 0.1), and sums and products of tiles are inputs
  too. Tiles have no transformer over dimensions, which is in the published tile run alone. An own
  collection is trained on alone unless `data.also` names others.
  """
  fifth(config)
  config.model.both_kinds = True
  own = ":".join(("layout", config.data.source, config.data.search))
  if own in RELEASED:
    config.data.also = tuple(name for name in RELEASED if name != own)




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



def tile_fifth(config: ConfigDict) -> None:
  """5th place, tiles: tensor dimensions as tokens of a transformer in front of SAGE.

  Published: six tokens per node, two transformer layers of width 256, then the encoder of
  the layout model, with a virtual node per 10,000 nodes; 128 slates of 32 configurations;
  pairs across kernels compare absolute runtimes. The published tokens mix dimensions, see
  `rankers.composed.inputs`: here they do not. Equal tokens are encoded once, as published.
  The layouts in tokens are -1 throughout, as published. Here what tokens hold of shapes and
  windows also stands among the scalars of a node, and eight configurations at a time pass through
  the model.
  """
  config.data.update(
      features=("released", "dimension_tokens"), config_transform="none",
      virtual_node="cluster", cluster_nodes=10_000,
      feature_transform="convolution=left_out,layout=left_out,shape=signed_log,window=signed_log,"
                        "slice=signed_log,padding=signed_log,dimension_tokens=none,*=minmax")
  config.batch.update(
      graphs=128, configs=32, config_chunk=8, graph_sampling="sqrt", target="absolute")
  composed(config, op_embed_dim=64, merge_unary=True, dimension_encoder="transformer",
           pre_widths=(384,), widths=(384,) * 3, direction_merge="concat", pooling=("sum",),
           drop_edge=0.15)
  loss(config, "PairwiseHingeLoss:1,CrossHingeLoss:1", pair_reduction="mean_all", margin=0.1)
  optimizer(config, weight_decay=1e-2, schedule="cosine", clip_norm=1.0)



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
    "gst": gst, "seventh": seventh, "fourth": fourth, "fifth": fifth,
    "fifth_all": fifth_all, "tenth": tenth}
TILES: dict[str, Preset] = {
    "fifth": tile_fifth,
    "tenth": tile_tenth, "mlsys21": mlsys21,
    "mlsys21_per_node": mlsys21_per_node, "mlsys21_lstm": mlsys21_lstm,
    "mlsys21_transformer": mlsys21_transformer, "mlsys21_gat": mlsys21_gat,
    "mlsys21_work": mlsys21_work, "mlsys21_fusion": mlsys21_fusion,
    "mlsys21_fusion_work": mlsys21_fusion_work}
