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
MODELS = (NAME,)  # those of presets


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


LAYOUTS: dict[str, Preset] = {
    "fifth": fifth, "fifth_all": fifth_all}
TILES: dict[str, Preset] = {"fifth": tile_fifth}
