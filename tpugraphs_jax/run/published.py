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


LAYOUTS: dict[str, Preset] = {
    "third": third, "sixth": sixth, "sixth_gin": sixth_gin}
TILES: dict[str, Preset] = {"third": tile_third, "sixth": tile_sixth}
