"""The sections of a config: which options they have, their defaults, and what is refused.

Every section is a class of described options (`options.Options`) beside the code that reads it. The
section `model` has the options of the network that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from tpugraphs_jax import collections, losses, options
from tpugraphs_jax.data import plan
from tpugraphs_jax.options import Limits, option, Options
from tpugraphs_jax.rankers import base, settings
from tpugraphs_jax.rankers.segments.family import FinetuneOptions, SegmentOptions
from tpugraphs_jax.train import log, loop, state

_SEARCHES = ("random", "default")  # of released collections of layouts
_PLACES = ("data_root",)  # of a run, set by the command


class FinetuneOptimizer(state.Optimizer):
  """The optimiser of the second stage."""

  section = "segments.finetune.optimizer"


_SEGMENTS = {"segments": SegmentOptions, "segments.finetune": FinetuneOptions,
             FinetuneOptimizer.section: FinetuneOptimizer}


@dataclasses.dataclass(frozen=True)
class RunOptions(Options):
  """Fields of a config that are in no section."""

  task: str = option("layout", "what is ranked, and how it is trained", one_of=settings.TASKS)
  seed: int = option(0, "seed of parameters, batches and samples", least=0)
  extensions: tuple[str, ...] = option((), "modules of your own that register models, losses, ...")
  profile_steps: str = option("", "FIRST:LAST writes a trace of these steps")


def sections(task: str) -> dict[str, type[Options]]:
  """The class of each section of a task's configs, by name; `segments.finetune` is within another.

  Args:
    task: `tile`, `layout` or `segments`.
  """
  return {
      "": RunOptions, "data": settings.DATA[task], "batch": plan.BatchOptions,
      "loss": losses.LossOptions, "optimizer": state.Optimizer, "train": loop.TrainOptions,
      "eval": settings.EVAL[task],
      **(_SEGMENTS if task == "segments" else {})}


def defaults(task: str) -> ConfigDict:
  """A config of a task with the default of every field, and no model."""
  fields = {f"{section}.{name}".lstrip("."): value
            for section, of_class in sections(task).items()
            for name, value in of_class.defaults().items()}
  return ConfigDict(traverse_util.unflatten_dict(fields | {"task": task, "model": {}}, sep="."))


def model(kind: str, name: str, **chosen: Any) -> ConfigDict:
  """The section `model` of a config: all options of a network, those given and the defaults.

  Args:
    kind: `layout` or `tile`.
    name: a registered name.
    **chosen: options of the network.
  """
  return ConfigDict({"name": name} | base.options_of(base.MODELS[kind][name]) | chosen)


def kind_of(config: ConfigDict) -> str:
  """The kind of the configurations that a config ranks, `tile` or `layout`."""
  return "tile" if config.task == "tile" else "layout"


def described(config: ConfigDict) -> dict[str, Limits]:
  """The limits of every described field of a config (`batch.graphs`), by name."""
  found = {f"{section}.{name}".lstrip("."): limits
           for section, of_class in sections(config.task).items()
           for name, (_, limits) in options.limits_of(of_class).items()}
  models = base.MODELS[kind_of(config)]
  found["model.name"] = Limits("network", one_of=tuple(models))
  if config.model.get("name") in models:
    build = models[config.model.name]
    build = build.func if isinstance(build, functools.partial) else build
    if inspect.isclass(build):
      found |= {f"model.{name}": limits for name, (_, limits) in options.limits_of(build).items()}
  return found


def check(config: ConfigDict) -> None:
  """Refuses fields that no code reads, and values that cannot work with any data.

  Options that a model does not have or cannot combine are refused when the ranker is made.

  Raises:
    ValueError: with the field, its value and what was expected.
  """
  check_task(config)
  for section, of_class in sections(config.task).items():
    fields = _at(config, section)
    _check_names(config, section, fields, of_class)
    of_class.of(fields)
  _check_pairs(config)


def check_task(config: ConfigDict) -> None:
  """Refuses (ValueError) a config without the sections of the task that it names."""
  task = config.get("task")
  if task not in settings.TASKS:
    raise ValueError(f"task is {task!r}, expected one of {', '.join(settings.TASKS)}")
  for section, of_class in sections(task).items():
    fields = _at(config, section)
    lacking = [section] if fields is None else [
        f"{section}.{name}".lstrip(".") for name in of_class.defaults() if name not in fields]
    if lacking:
      raise ValueError(f"task is {task}, but the config has no {lacking[0]}: name a file and "
                       "variant of that task in --config")


def _at(config: ConfigDict, section: str) -> Any:
  fields = config.to_dict()
  for name in filter(None, section.split(".")):
    fields = fields.get(name)
    if not isinstance(fields, Mapping):
      return None
  return fields


def _check_names(
    config: ConfigDict, section: str, fields: Mapping[str, Any], of_class: type[Options]) -> None:
  names = sections(config.task)
  within = {name.removeprefix(f"{section}.").split(".")[0] for name in names
            if name.startswith(f"{section}.") or not section}
  known = options.limits_of(of_class).keys() | within | ({"model", *_PLACES} - {""} if not section
                                                         else set())
  for name in fields:
    if name not in known:
      field = f"{section}.{name}".lstrip(".")
      near = options.nearest(field, [*described(config), *names])
      raise ValueError(f"the config has a field {field!r} that nothing reads; "
                       f"{near}--print_config lists all")


def _check_pairs(config: ConfigDict) -> None:
  """The rules that span sections."""
  batch, target, data = config.batch, config.batch.target, config.data
  log.Profile(config.profile_steps, Path())  # refuses steps that it cannot read
  is_released = data.source != collections.OWN
  if kind_of(config) == "layout" and is_released and data.search not in _SEARCHES:
    raise ValueError(f"data.search is {data.search!r}, expected {' or '.join(_SEARCHES)}")
  if batch.config_chunk and batch.configs % batch.config_chunk:
    raise ValueError(f"batch.config_chunk is {batch.config_chunk}, expected a divisor of "
                     f"batch.configs, which is {batch.configs}, or 0")
  for name, _ in losses.LossOptions.of(config.loss).weighted:
    if name in losses.NEED_POSITIVE_LABELS and target not in ("official", "absolute"):
      raise ValueError(f"loss.losses has {name}, which needs runtimes, and batch.target is "
                       f"{target!r}: set it to official or absolute")
  if config.task == "segments":
    _check_segments(config)
  if config.data.get("also"):
    _check_also(config)


def _check_also(config: ConfigDict) -> None:
  own, also = collections.of("layout", config.data.source, config.data.search), config.data.also
  kinds = {collections.Collection(name).kind for name in also}
  if own.name in also or len(set(also)) < len(also) or kinds != {"layout"}:
    raise ValueError(f"data.also is {tuple(also)}, expected different layout collections besides "
                     f"{own.name}, the run's own")
  if config.task == "segments":
    raise ValueError(f"data.also is {tuple(also)}, but Graph Segment Training is of one "
                     "collection: take the variant full, or leave data.also empty")


def _check_segments(config: ConfigDict) -> None:
  if config.data.virtual_node != "none":
    raise ValueError(f"data.virtual_node is {config.data.virtual_node!r}, but segments have no "
                     "edges between them: set it to 'none', or train on whole graphs")
  if not config.batch.drop_remainder:
    raise ValueError("batch.drop_remainder is False, but every device trains on segments in each "
                     "step: set it to True, or train on whole graphs (variant full)")
  if config.batch.config_chunk:
    raise ValueError("batch.config_chunk does not go with segments, which bound memory themselves: "
                     "set it to 0")
  if config.segments.finetune.epochs and config.segments.readout == "scalar":
    raise ValueError("segments.finetune.epochs needs segments.readout=embedding: with scalar the "
                     "head comes before the sum over segments")
