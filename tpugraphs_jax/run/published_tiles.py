"""Published tile systems as settings of one ranker: `configs/tile.py:preset=NAME`.

What holds for `presets` holds here: docstrings say what was published and what differs.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from ml_collections import ConfigDict

from tpugraphs_jax.run.published import Preset, composed, loss, optimizer

_STEPS = dict(milestones=(0.6, 0.7, 0.8, 0.9), milestone_factor=10**-0.5)


def first(config: ConfigDict) -> None:
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


def second_tile(config: ConfigDict) -> None:
  """2nd place, tiles: eight SAGE layers, a scalar per node and their sum, DiffMat.

  Published: margin 0.1 in units of the default tile's runtime, the loss not divided by
  it, slates of ten configurations of a hundred kernels, equal tiles once with their fastest
  runtime, tiles as they are. Here the loss is divided by the margin, which Adam does not notice.
  """
  config.data.update(feature_transform="signed_log", config_transform="none",
                     duplicate_policy="min")
  config.batch.update(graphs=100, configs=10, sampling="uniform_replacement", target="official")
  composed(config, op_embed_dim=12, feature_width=20, pre_widths=(64,),
           widths=(256,) * 4 + (512,) * 4, edge_direction="backward", readout="node_scalar_sum")
  loss(config, "DiffMatLoss:1", margin=0.1)
  optimizer(config, name="adam", schedule="multistep", **_STEPS)


def third(config: ConfigDict) -> None:
  """3rd place, tiles: four SAGE layers with layer norm, the inverse logarithm of hinges.

  Published: 16 columns of directed random walks and a virtual node fed by all roots. Here
  features are standardised behind a signed logarithm.
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


def fifth(config: ConfigDict) -> None:
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


def sixth(config: ConfigDict) -> None:
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


def tenth(config: ConfigDict) -> None:
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
  runtimes, in milliseconds). Widths are guesses; edges count alike in both directions. The
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


def _variant(what: str, **options: Any) -> Callable[[ConfigDict], None]:
  preset = functools.partial(mlsys21, **options)
  preset.__doc__ = f"mlsys21 with {what}"
  return preset


PRESETS: dict[str, Preset] = {
    "first": first, "second_tile": second_tile, "third": third, "fifth": fifth, "sixth": sixth,
    "tenth": tenth, "mlsys21": mlsys21,
    "mlsys21_per_node": _variant("a score per node", readout="node_scalar_sum", head_widths=()),
    "mlsys21_lstm": _variant("an LSTM over nodes in order", readout="lstm"),
    "mlsys21_transformer": _variant(
        "a transformer over nodes", readout="transformer", heads=4, pooling=("sum",)),
    "mlsys21_gat": _variant("graph attention", conv="gatv2", heads=4),
    "mlsys21_work": _variant("estimates of a kernel's work", work=True),
    "mlsys21_fusion": _variant("the error of log runtimes", fusion=True),
    "mlsys21_fusion_work": _variant(
        "the error of log runtimes and estimates of a kernel's work", fusion=True, work=True)}
