"""The schema of a config: sections, defaults, and refusals of values that contradict each other.

A section is a subclass of `options.Options` beside the code that reads it, such as
`train.optimizer.Optimizer`. `options.check_value` refuses a value of a wrong type or out of range,
the method `check` of a section values that contradict each other in it, and the function `check`
here values of different sections. The section `model` has the options of its network
(`rankers.base.check_options`).
"""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from tpugraphs_jax import datasets, losses, options
from tpugraphs_jax.data import plan
from tpugraphs_jax.infra import trust
from tpugraphs_jax.options import Limits, Options
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.segments.family import FinetuneOptions, SegmentOptions
from tpugraphs_jax.train import log, loop
from tpugraphs_jax.train.optimizer import Optimizer

_SEGMENTS = {"segments": SegmentOptions, "segments.finetune": FinetuneOptions}


def sections(task: str) -> dict[str, type[Options]]:
  """The class of each section by name, subsections such as `segments.finetune` included.

  Args:
    task: `tile`, `layout` or `segments`.
  """
  return {
    "": base.RunOptions,
    "data": base.DATA[base.kind_of(task)],
    "batch": plan.BatchOptions,
    "loss": losses.LossOptions,
    "optimizer": Optimizer,
    "train": loop.TrainOptions,
    "eval": base.EVAL[base.kind_of(task)],
    **(_SEGMENTS if task == "segments" else {}),
  }


def _declared(task: str) -> dict[str, tuple[Any, Limits]]:
  """Default and limits of the fields of a task by name (`batch.graphs`), not of models."""
  return {
    f"{section}.{name}".lstrip("."): declared
    for section, section_class in sections(task).items()
    for name, declared in options.limits_of(section_class).items()
  }


def defaults(task: str) -> ConfigDict:
  """A config of a task with the default of every field, and no model."""
  fields = {name: default for name, (default, _) in _declared(task).items()}
  return ConfigDict(traverse_util.unflatten_dict(fields | {"task": task, "model": {}}, sep="."))


def model(task: str, name: str, **values: Any) -> ConfigDict:
  """The section `model` of a config: all options of a network.

  Args:
    task: one of `base.TASKS`.
    name: a registered name.
    **values: of options; the others have their defaults, if a config can have these.
  """
  defaults = base.options_of(base.MODELS[base.kind_of(task)][name]).items()
  plain = {option: value for option, value in defaults if isinstance(value, (*trust.SCALAR, tuple))}
  return ConfigDict({"name": name} | plain | values)


def limits(config: ConfigDict) -> dict[str, Limits]:
  """The limits of the fields of a config, by name (`batch.graphs`)."""
  result = {name: limits for name, (_, limits) in _declared(config.task).items()}
  models = base.MODELS[base.kind_of(config.task)]
  result["model.name"] = Limits("network", one_of=tuple(models))
  if config.model.get("name") in models:
    network = base.limits_of_network(models[config.model.name])
    result |= {f"model.{name}": each for name, (_, each) in network.items()}
  return result


def check(config: ConfigDict) -> None:
  """Refuses unknown fields, and values that cannot work with any data.

  Raises:
    ValueError: the message has the field, its value and the expectation.
  """
  check_task(config)
  known = {*_declared(config.task), "data_root"}  # which the command sets
  for name in _fields(config):
    if name not in known and not name.startswith("model."):
      near = options.nearest(name, [*limits(config), *sections(config.task)])
      raise ValueError(
        f"the config has a field {name!r} that nothing reads; {near}--print_config lists all"
      )
  for section, section_class in sections(config.task).items():
    fields = functools.reduce(operator.getitem, filter(None, section.split(".")), config)
    section_class.of(fields)
  network = config.model.to_dict()
  base.check_options(base.kind_of(config.task), network.pop("name"), network)
  _check_pairs(config)


def check_task(config: ConfigDict) -> None:
  """Refuses (ValueError) a config of no task, or without the fields of its task."""
  task, fields = config.get("task"), _fields(config)
  if task not in base.TASKS:
    raise ValueError(f"task is {task!r}, expected one of {', '.join(base.TASKS)}")
  if absent := [name for name in _declared(task) if name not in fields]:
    raise ValueError(
      f"task is {task}, but the config has no {absent[0]}: name a file and "
      "variant of that task in --config"
    )


def _fields(config: ConfigDict) -> dict[str, Any]:
  """The fields of a config by name, such as `batch.graphs`; an empty section is one."""
  return traverse_util.flatten_dict(config.to_dict(), keep_empty_nodes=True, sep=".")


def _check_pairs(config: ConfigDict) -> None:
  """Refuses values that contradict each other across sections."""
  batch, target, data = config.batch, config.batch.target, config.data
  log.Profile(config.profile_steps, Path())  # refuses malformed steps
  is_released_layout = config.task != "tile" and data.source != datasets.OWN
  if is_released_layout and data.search not in ("random", "default"):
    raise ValueError(f"data.search is {data.search!r}, expected random or default")
  if batch.config_chunk and batch.configs % batch.config_chunk:
    raise ValueError(
      f"batch.config_chunk is {batch.config_chunk}, expected a divisor of "
      f"batch.configs, which is {batch.configs}, or 0"
    )
  for name, _ in losses.LossOptions.of(config.loss).weighted:
    if name in losses.NEED_POSITIVE_LABELS and target not in ("official", "absolute"):
      raise ValueError(
        f"loss.losses has {name}, which needs runtimes, and batch.target is "
        f"{target!r}: set it to official or absolute"
      )
  if config.task == "segments":
    _check_segments(config)
  if config.data.get("also"):
    _check_also(config)


def _check_also(config: ConfigDict) -> None:
  first, also = datasets.of("layout", config.data.source, config.data.search), config.data.also
  kinds = {datasets.Collection(name).kind for name in also}
  if first.name in also or len(set(also)) < len(also) or kinds != {"layout"}:
    raise ValueError(
      f"data.also is {tuple(also)}, expected different layout collections other "
      f"than {first.name}, which the config names"
    )
  if config.task == "segments":
    raise ValueError(
      f"data.also is {tuple(also)}, but Graph Segment Training takes one "
      "collection: take the variant full, or leave data.also empty"
    )


def _check_segments(config: ConfigDict) -> None:
  if config.data.virtual_node != "none":
    raise ValueError(
      f"data.virtual_node is {config.data.virtual_node!r}, but segments have no "
      "edges between them: set it to 'none', or train on whole graphs"
    )
  if not config.batch.drop_remainder:
    raise ValueError(
      "batch.drop_remainder is False, but training on segments needs full batches: "
      "set it to True, or train on whole graphs (variant full)"
    )
  if config.batch.config_chunk:
    raise ValueError(
      "batch.config_chunk does not go with segments, which bound memory already: set it to 0"
    )
  if config.segments.finetune.epochs and config.segments.readout == "scalar":
    raise ValueError(
      "segments.finetune.epochs needs segments.readout=embedding: with scalar the "
      "head comes before the sum over segments"
    )
  if config.segments.finetune.epochs and config.train.valid_sampling == "slates":
    raise ValueError(
      "train.valid_sampling is 'slates', but segments.finetune.epochs needs equal "
      "configurations in every evaluation: set it to fixed"
    )
