"""Shared code of configs: the defaults of a task, the names after the colon, and `ci`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import difflib
import importlib
import itertools
import pkgutil
from typing import Any, NamedTuple

from ml_collections import ConfigDict

Change = Callable[[ConfigDict], None]  # the first line of its docstring describes the ranker


class RankerSettings(NamedTuple):
  """Settings of a network and its training, under the name of a ranker.

  Attributes:
    change: changes the config that `get_config` of `tile.py` or `layout.py` begins.
    ci_options: options of the network for `ci`.
    is_published: apply `_published` before `change`.
  """

  change: Change
  ci_options: Mapping[str, Any] = {}
  is_published: bool = False

  def apply(self, config: ConfigDict, *, ci: bool = False) -> None:
    """Adds the network and its training to a config that has none; `ci` makes the run small."""
    if self.is_published:
      _published(config)
    self.change(config)
    if ci:
      small(config, **self.ci_options)
      config.eval.configs = 8 if self.is_published else config.eval.configs

  @property
  def description(self) -> str:
    """A description in one line."""
    return self.change.__doc__.splitlines()[0].removesuffix(".")


_CI = "ci"
PRESET = "preset="  # prefix of the names of published systems
OWN = "own-"  # prefix of the names of own collections
_ONE_RANKER = (
  "a config has one collection and one ranker; --config.FIELD changes a field "
  "(--config.model.name=NAME the network)"
)


def defaults(task: str, collection: str) -> ConfigDict:
  """A config of a collection with the default of every field, without a model.

  Args:
    task: `tile` or `layout`.
    collection: name such as `xla` (kernels), `nlp-default` (programs) or `own-NAME`.
  """
  from tpugraphs_jax.train import schema

  config = schema.defaults(task)
  source, _, search = collection.partition("-")
  config.data.source, config.data.search = source, search
  return config


def in_segments(config: ConfigDict, *, finetune_epochs: int = 0, **fields: Any) -> None:
  """Changes a config to training on segments; see `tpugraphs_jax/rankers/segments/family.py`.

  Args:
    config: config for whole programs.
    finetune_epochs: epochs of the head alone, after the other epochs.
    **fields: fields of the section `segments`.
  """
  from tpugraphs_jax.train import schema

  config.task = "segments"
  config.segments = schema.defaults("segments").segments
  config.segments.update(fields)
  config.segments.finetune.epochs = finetune_epochs
  config.batch.drop_remainder = True
  config.eval.graphs = 4  # segments per device and scoring call


def model(kind: str, name: str, **options: Any) -> ConfigDict:
  """The section `model`: all options of a network.

  Args:
    kind: `layout` or `tile`.
    name: registered name of the network.
    **options: values of options; all other options have their defaults.
  """
  from tpugraphs_jax.train import schema

  return schema.model(kind, name, **options)


def presets(kind: str) -> dict[str, RankerSettings]:
  """The published systems of `configs/systems`, by variant.

  Args:
    kind: `layout` or `tile`.
  """
  from tpugraphs_jax.configs import systems

  rankers = {}
  for module in pkgutil.iter_modules(systems.__path__):
    file = importlib.import_module(f"{systems.__name__}.{module.name}")
    rankers |= {
      PRESET + name: RankerSettings(change, file.SMALL, is_published=True)
      for name, change in getattr(file, f"{kind.upper()}S", {}).items()
    }
  return rankers


def _published(config: ConfigDict) -> None:
  """Common settings of published systems, mostly PyTorch's defaults.

  AdamW has a constant rate, and no weight decay, clipping or warm-up. Layouts are padded with 0,
  and equal configurations stay. The loss has no penalties. Nothing stops a run early.
  """
  config.data.update(pad_value=0, duplicate_policy="keep")
  config.batch.min_configs = 2
  config.loss.update(losses="ListMLELoss:1", temperature=1.0, kernel_l2=0.0, activity_l2=0.0)
  config.optimizer.update(
    name="adamw",
    learning_rate=1e-3,
    schedule="constant",
    warmup_fraction=0.0,
    eps=1e-8,
    weight_decay=0.0,
    clip_norm=0.0,
    clip_norm_per_variable=0.0,
  )
  config.train.update(valid_sampling="fixed", early_stop_epochs=0)


def small(config: ConfigDict, **options: Any) -> None:
  """Changes a config to a run of a few seconds: few and narrow layers, few slates.

  Args:
    config: complete config.
    **options: options of networks; unknown options of the network are ignored.
  """
  config.train.quick_compile = True
  config.model.update({name: size for name, size in options.items() if name in config.model})
  config.batch.update(graphs=4, configs=8, slates_per_epoch=16, min_configs=4, keep_nodes=100)
  config.optimizer.accumulation_steps = 1
  config.train.update(epochs=2, valid_configs=50, log_every_steps=4)
  if "segments" in config:
    config.segments.max_nodes = 60


# Names after the colon: at most one collection, one ranker, and `ci`.


def arguments(
  text: str, *, file: str, collections: Sequence[str], rankers: Mapping[str, RankerSettings]
) -> tuple[str, str, bool]:
  """Parses a variant into the collection, the ranker, and whether it has `ci`.

  An absent collection or ranker is an empty string.

  Args:
    text: names, separated by commas, in any order.
    file: name of the config file, for errors.
    collections: allowed collections, in addition to `own-NAME`.
    rankers: allowed rankers, by name.

  Raises:
    ValueError: a name is unknown, or there are two collections or rankers.
  """
  names = [name for name in text.split(",") if name]
  kinds = (
    [name for name in names if name in collections or name.startswith(OWN)],
    [name for name in names if name in rankers],
  )
  allowed = [*collections, *rankers, _CI]
  for name in names:
    if name not in (*itertools.chain(*kinds), _CI):
      raise ValueError(
        f"configs/{file} has no variant {name!r}; {_hint(name, file, allowed)}it "
        f"has {', '.join(filter(None, allowed))}"
      )
  for kind in kinds:
    if len(kind) > 1:
      raise ValueError(f"{file} takes one of {' and '.join(kind)}: {_ONE_RANKER}")
  collection, ranker = (kind[0] if kind else "" for kind in kinds)
  return collection, ranker, _CI in names


def _hint(name: str, file: str, allowed: Sequence[str]) -> str:
  """Start of a sentence with the config file that has a name, or with the nearest allowed name."""
  for other in ("tile", "layout"):
    if name in importlib.import_module(f"{__package__}.{other}").VARIANTS:
      return f"it is a variant of configs/{other}.py, of the command run_{other}; configs/{file}: "
  near = difflib.get_close_matches(name, allowed, n=1)
  return f"did you mean {near[0]}? " if near else ""


def variants(
  collections: Mapping[str, str], rankers: Mapping[str, RankerSettings]
) -> dict[str, str]:
  """Descriptions of all names after the colon, by name."""
  own = {f"{OWN}NAME": "a collection of your own"}
  named = {name: ranker.description for name, ranker in rankers.items() if name}
  return {**collections, **own, **named, _CI: "a few seconds on a CPU"}
