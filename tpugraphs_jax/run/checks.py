"""Refuses impossible values of a config by the name of the field, before any data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import operator
from pathlib import Path
from typing import Any

import ml_collections

from tpugraphs_jax import collections, losses
from tpugraphs_jax.data import feature_blocks, features, plan, reduction, selection
from tpugraphs_jax.nn import pooling
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.segments import family as segments
from tpugraphs_jax.rankers.segments import history, partition
from tpugraphs_jax.train import log, state

TASKS = ("tile", "layout", "segments")
_PRECISIONS = ("default", "high", "highest")  # of jax.lax.Precision
_DTYPES = ("float32", "bfloat16")  # of the computation; parameters are float32
_MAXIMISED = ("opa", "kendaltau")  # metrics that can say which checkpoint is best
# Fields that tell the configs of the tasks apart.
_TASK_FIELDS = {"tile": (), "layout": ("data.store_dir",),
                "segments": ("data.store_dir", "segments")}
_SEGMENT_CHOICES = {
    "segments.partition": tuple(partition.METHODS), "segments.readout": segments.READOUTS,
    "segments.aggregation": segments.AGGREGATIONS,
    "segments.keep_unit": segments.KEEP_UNITS, "segments.history_dtype": history.DTYPES,
}
# The smallest value of every field that is a number.
_LEAST = {
    "seed": 0, "batch.graphs": 1, "batch.configs": 2, "batch.min_configs": 2,
    "batch.slates_per_epoch": 0, "batch.config_chunk": 0, "data.loader_threads": 0,
    "data.neighbour_slots": -1, "data.cluster_nodes": 1, "eval.graphs": 1,
    "eval.permutations": 1, "eval.configs": 2, "loss.kernel_l2": 0, "loss.activity_l2": 0,
    "train.epochs": 1, "train.eval_every_epochs": 1, "train.early_stop_epochs": 0,
    "train.valid_configs": 0, "train.log_every_steps": 1, "train.checkpoint_every_steps": 0,
}
_LEAST_OF_LAYOUTS = {
    "data.entropy_threshold": 0, "data.reduction_hops": 1, "data.max_configs": 0,
    "batch.keep_nodes": 2, "eval.max_configs": 0}
_LEAST_OF_SEGMENTS = {
    "segments.max_nodes": 2, "segments.fresh": 1, "segments.finetune.epochs": 0,
    "segments.finetune.configs": 0}


def one_of(config: ml_collections.ConfigDict, choices: Mapping[str, Sequence[Any]]) -> None:
  """ValueError unless every field (`batch.sampling`) has one of its values."""
  for field, allowed in choices.items():
    value = operator.attrgetter(field)(config)
    if value not in allowed:
      raise ValueError(f"{field} is {value!r}, expected one of {', '.join(map(str, allowed))}")


def at_least(config: ml_collections.ConfigDict, limits: Mapping[str, float]) -> None:
  """ValueError unless every field (`batch.configs`) is a number that is large enough."""
  for field, least in limits.items():
    value = operator.attrgetter(field)(config)
    if not value >= least:  # nor NaN
      raise ValueError(f"{field} is {value}, expected at least {least}")


def task(config: ml_collections.ConfigDict) -> None:
  """ValueError unless the config is one of the task that it names."""
  one_of(config, {"task": TASKS})
  for field in _TASK_FIELDS[config.task]:
    section, _, name = field.rpartition(".")
    if name not in (config[section] if section else config):
      raise ValueError(f"task is {config.task}, but the config has no {field}: name a file and "
                       "variant of that task in --config")


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses values and combinations of fields that cannot work with any data.

  Options that a model does not have or cannot combine are refused when the ranker is made.

  Raises:
    ValueError: with the field, its value and what was expected.
  """
  task(config)
  # The registry of models says more of an unknown name.
  one_of(config, {field: allowed for field, allowed in choices(config).items()
                  if field != "model.name"})
  least = _LEAST | {f"model.{name}": 1 for name in config.model
                    if name.endswith("_dim") or name.startswith("num_")}
  if config.task != "tile":
    least |= _LEAST_OF_LAYOUTS
  if config.task == "segments":
    least |= _LEAST_OF_SEGMENTS
  at_least(config, least)
  _check_training(config)
  _check_loss(config)
  if config.data.get("also"):
    _check_also(config)
  if config.task == "segments":
    _check_segments(config)


def choices(config: ml_collections.ConfigDict) -> dict[str, Sequence[Any]]:
  """The allowed values of every field that has a few (`batch.sampling`), by field."""
  is_tile, own = config.task == "tile", collections.OWN
  model = {"name": tuple(models_of(config)), "precision": _PRECISIONS, "dtype": _DTYPES}
  found = {
      "task": TASKS, "batch.sampling": plan.SAMPLINGS, "batch.target": selection.TARGETS,
      "batch.graph_sampling": plan.GRAPH_SAMPLINGS, "loss.pair_reduction": losses.REDUCTIONS,
      "optimizer.name": state.OPTIMIZERS, "optimizer.schedule": state.SCHEDULES,
      "data.virtual_node": reduction.VIRTUAL_NODES, "data.pad_value": (0, -1),
      "data.config_transform": features.KINDS,
      "data.duplicate_policy": selection.DUPLICATE_POLICIES, "train.best_metric": _MAXIMISED,
      "train.result": ("best", "last"),
      "train.valid_sampling": plan.VALID_SAMPLINGS,
      "data.config_features": feature_blocks.CONFIG_FEATURES["tile" if is_tile else "layout"],
      "data.source": ("xla", own) if is_tile else ("xla", "nlp", own),
      **{f"model.{name}": allowed for name, allowed in model.items() if name in config.model},
  }
  if not is_tile:
    found |= {"data.graph_reduction": reduction.REDUCTIONS,
              "data.reduction_direction": reduction.DIRECTIONS,
              "data.reduction_induced": reduction.INDUCED}
  if not is_tile and config.data.source != own:
    found["data.search"] = ("random", "default")
  return found | (_SEGMENT_CHOICES if config.task == "segments" else {})


def models_of(config: ml_collections.ConfigDict) -> Mapping[str, Any]:
  """The registered models of a config's task, by name."""
  return base.MODELS["tile" if config.task == "tile" else "layout"]


def loss_options(config: ml_collections.ConfigDict) -> losses.Options:
  """Options of the losses that a config names; ValueError for impossible ones."""
  loss = config.loss
  return losses.Options(
      loss.pair_reduction, loss.margin, loss.score_norm_clip)


def parts() -> dict[str, Sequence[str]]:
  """The allowed names of every field that lists several names, by field."""
  return {"loss.losses": tuple(losses.LOSSES), "data.features": tuple(feature_blocks.BLOCKS),
          "model.pooling": pooling.names(),
          "data.feature_transform": (*features.KINDS, "log_offset(K)")}


def _check_training(config: ml_collections.ConfigDict) -> None:
  chunk = config.batch.config_chunk
  if chunk and config.batch.configs % chunk:
    raise ValueError(f"batch.config_chunk is {chunk}, expected a divisor of batch.configs, which "
                     f"is {config.batch.configs}, or 0")
  log.Profile(config.profile_steps, Path())
  state.create_optimizer(total_steps=1, **config.optimizer)


def _check_loss(config: ml_collections.ConfigDict) -> None:
  loss, target = config.loss, config.batch.target
  names = [name for name, _ in losses.parse_losses(loss.losses)]
  if not loss.temperature > 0:
    raise ValueError(f"loss.temperature is {loss.temperature}, expected a number above 0")
  loss_options(config)
  for name in set(names) & set(losses.NEED_POSITIVE_LABELS):
    if target not in ("official", "absolute"):
      raise ValueError(f"loss.losses has {name}, which needs runtimes, and batch.target is "
                       f"{target!r}: set it to official or absolute")


def _check_also(config: ml_collections.ConfigDict) -> None:
  own, also = collections.of("layout", config.data.source, config.data.search), config.data.also
  kinds = {collections.Collection(name).kind for name in also}
  if own.name in also or len(set(also)) < len(also) or kinds != {"layout"}:
    raise ValueError(f"data.also is {tuple(also)}, expected different layout collections besides "
                     f"{own.name}, the run's own")
  if config.task == "segments":
    raise ValueError(f"data.also is {tuple(also)}, but Graph Segment Training is of one "
                     "collection: take the variant full, or leave data.also empty")


def _check_segments(config: ml_collections.ConfigDict) -> None:
  options = config.segments
  if config.data.virtual_node != "none":
    raise ValueError(f"data.virtual_node is {config.data.virtual_node!r}, but segments have no "
                     "edges between them: set it to 'none', or train on whole graphs")
  if not config.batch.drop_remainder:
    raise ValueError("batch.drop_remainder is False, but every device trains on segments in each "
                     "step: set it to True, or train on whole graphs (variant full)")
  if config.batch.config_chunk:
    raise ValueError("batch.config_chunk does not go with segments, which bound memory themselves: "
                     "set it to 0")
  if not 0 <= options.keep <= 1:
    raise ValueError(f"segments.keep is {options.keep}, expected 0 to 1: the probability that a "
                     "segment without gradient counts")
  if options.recompute and options.keep != 1:
    raise ValueError(f"segments.keep is {options.keep}, but with segments.recompute every segment "
                     "counts: set keep to 1")
  if options.finetune.epochs and options.readout == "scalar":
    raise ValueError("segments.finetune.epochs needs segments.readout=embedding: with scalar the "
                     "head comes before the sum over segments")
  try:
    state.create_optimizer(total_steps=1, **options.finetune.optimizer)
  except ValueError as error:
    raise ValueError(f"segments.finetune: {error}") from None
