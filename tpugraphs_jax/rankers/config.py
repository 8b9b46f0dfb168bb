"""The config of a run: one tree of sections, which flags, Python and files have in common.

    Config
      data        TileDataOptions, LayoutDataOptions: the collection, its features, what is left out
      batch       data.plan.BatchOptions: slates of a training step
      model       Model: the network and its options
      loss        losses.LossOptions
      optimizer   optimizer.Optimizer
      train       TrainOptions: length, evaluations, the choice of the model
      eval        EvalOptions, LayoutEvalOptions: batches of scoring, what is judged
      segments    SegmentOptions; None = training on whole graphs

A section is a subclass of `config_fields.Options`: a field of it is declared once, and a bad value
is refused when the section is made. `Config.check` refuses values of different sections that
contradict each other. `Config.replace` changes fields by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
import dataclasses
import re
from typing import Any, ClassVar

from flax import traverse_util

from tpugraphs_jax import config_fields, datasets, losses
from tpugraphs_jax.config_fields import Limits, limits_of, option, Options
from tpugraphs_jax.data import plan, reduction, selection, transforms
from tpugraphs_jax.data.plan import BatchOptions
from tpugraphs_jax.infra import trust
from tpugraphs_jax.losses import LossOptions
from tpugraphs_jax.optimizer import Optimizer
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.scorer import EvalOptions
from tpugraphs_jax.rankers.segments.network import FinetuneOptions, SegmentOptions

__all__ = [  # what a config file needs
  "BatchOptions",
  "Config",
  "EvalOptions",
  "FinetuneOptions",
  "LayoutDataOptions",
  "LayoutEvalOptions",
  "LossOptions",
  "Model",
  "Optimizer",
  "SegmentOptions",
  "TileDataOptions",
  "TrainOptions",
]
TASKS = ("tile", "layout", "segments")  # in files


@dataclasses.dataclass(frozen=True)
class _DataOptions(transforms.FeatureOptions, plan.LoadingOptions, datasets.CollectionOptions):
  neighbour_slots: int = option(
    -1, "width of neighbour tables; 0 = sorted segment sum; -1 = by platform", least=-1, most=2**16
  )


@dataclasses.dataclass(frozen=True)
class TileDataOptions(_DataOptions, selection.TileOptions, reduction.VirtualNodes):
  """The section `data` for kernels."""

  kind: ClassVar[str] = "tile"


@dataclasses.dataclass(frozen=True)
class LayoutDataOptions(_DataOptions, selection.LayoutOptions, reduction.Reduction):
  """The section `data` for whole programs."""

  kind: ClassVar[str] = "layout"
  also: tuple[str, ...] = option((), "further layout collections to train on")


@dataclasses.dataclass(frozen=True)
class LayoutEvalOptions(EvalOptions, selection.JudgedOptions):
  """The section `eval` for whole programs."""


@dataclasses.dataclass(frozen=True)
class TrainOptions(Options):
  """The length of a run, and how often it evaluates, logs and saves."""

  section = "train"
  epochs: int = option(10, "most epochs", least=1)
  eval_every_epochs: int = option(1, "epochs between evaluations", least=1)
  early_stop_epochs: int = option(
    0, "epochs without a better evaluation that end the run; 0, or with result=last: never", least=0
  )
  best_metric: str = option(
    "opa", "metric of validation that chooses the model", one_of=("opa", "kendaltau")
  )
  result: str = option(
    "best", "evaluation that makes the model: best by best_metric, or last", one_of=("best", "last")
  )
  valid_sampling: str = option(
    "fixed",
    "sample that evaluations judge: fixed, or slates drawn anew each time",
    one_of=("fixed", "slates"),
  )
  valid_configs: int = option(200, "configurations per graph in the fixed sample; 0 = all", least=0)
  log_every_steps: int = option(20, "steps between two lines of the log", least=1)
  checkpoint_every_steps: int = option(
    0, "steps between checkpoints, beside a checkpoint per evaluation; 0 = none", least=0
  )
  deterministic: bool = option(False, "on GPUs: equal runs, bit for bit, but sums take longer")
  quick_compile: bool = option(
    False, "on CPUs: compiles in half the time, but steps take two to three times as long"
  )


class Model:
  """The section `model`: the registered name of a network, and its options.

  Options are attributes: `Model("SAGE", hidden_dim=64).hidden_dim`. An option that is not given has
  the default of the network.

  Args:
    name: as registered in `rankers.base`.
    kind: `tile` or `layout`, of the registry; `Config` sets it.
    **given: options of the network.
  """

  def __init__(self, name: str, *, kind: str = "layout", **given: Any):
    self.name, self.kind = name, kind
    self.given = {key: _plain(value) for key, value in given.items()}

  @property
  def options(self) -> dict[str, Any]:
    """All options by name, for a network that is not registered the given ones."""
    if self.name not in base.MODELS[self.kind]:
      return self.given
    defaults = base.options_of(base.MODELS[self.kind][self.name])
    is_plain = lambda value: isinstance(value, (*trust.SCALAR, tuple))
    return {key: value for key, value in defaults.items() if is_plain(value)} | self.given

  @property
  def limits(self) -> dict[str, tuple[Any, Limits]]:
    """Default and limits of the name and the options."""
    models = base.MODELS[self.kind]
    declared = {"name": (self.name, Limits("network", one_of=tuple(models)))}
    if self.name in models:
      declared |= base.limits_of_network(models[self.name])
    return declared

  def to_dict(self) -> dict[str, Any]:
    """The name and all options."""
    return {"name": self.name, **self.options}

  def __getattr__(self, name: str) -> Any:
    known = ("given", "kind", "name", "options")
    if name.startswith("_") or name in known or name not in self.options:
      raise AttributeError(f"model has no option {name!r}")
    return self.options[name]

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Model) and self.to_dict() == other.to_dict()

  def __repr__(self) -> str:
    given = (f"{name}={value!r}" for name, value in self.given.items())
    return f"Model({', '.join([repr(self.name), *given])})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Options):
  """The config of a run; see the module.

  Attributes:
    data_root: folder of the data; empty until a run has one.

  Raises:
    ValueError: values of different sections contradict each other.
  """

  seed: int = option(0, "seed of parameters, batches and samples", least=0, most=2**62 - 1)
  extensions: tuple[str, ...] = option((), "modules of your own that register models, losses, ...")
  profile_steps: str = option("", "FIRST:LAST writes a trace of these steps")
  model: Model
  data: TileDataOptions | LayoutDataOptions
  batch: BatchOptions = BatchOptions()
  segments: SegmentOptions | None = None
  loss: LossOptions = LossOptions()
  optimizer: Optimizer = Optimizer()
  train: TrainOptions = TrainOptions()
  eval: Any = None  # EvalOptions or LayoutEvalOptions, by the kind of `data`
  data_root: str = ""

  def __post_init__(self):
    model = Model(self.model.name, kind=self.kind, **self.model.given)
    object.__setattr__(self, "model", model)
    if self.eval is None:
      object.__setattr__(self, "eval", _sections(self.task)["eval"]())
    super().__post_init__()

  @property
  def kind(self) -> str:
    """The kind of configurations that the run ranks: `tile` or `layout`."""
    return self.data.kind

  @property
  def task(self) -> str:
    """One of `TASKS`: the kind, or `segments` for training on segments."""
    return _task_of(self.data, self.segments)

  @property
  def collection(self) -> datasets.Collection:
    """The collection of the run; of several the first one."""
    return datasets.find(self.kind, self.data.source, self.data.search)

  # Fields by name, such as `batch.graphs`.

  @property
  def fields(self) -> dict[str, Any]:
    """The values of all fields that a flag can set."""
    fields = self.to_dict()
    return _flat({name: fields[name] for name in fields if name not in ("task", "data_root")})

  @property
  def declared(self) -> dict[str, tuple[Any, Limits]]:
    """Default and limits of all fields that a flag can set."""
    return _declared(self.task) | {f"model.{k}": value for k, value in self.model.limits.items()}

  def replace(self, **changes: Any) -> Config:
    """A copy with other values.

    Args:
      **changes: sections (`model=Model("SAGE")`), or fields by name with `__` or `.` for the dot
        (`train__epochs=3`). `model.name` resets all other options of the network. Modules of
        `extensions` are imported. Scalars and arrays of NumPy and jax become Python's.

    Raises:
      ValueError: a field that the config does not have, or an impossible value.
    """
    config_fields.import_extensions(changes.get("extensions", ()))
    changes = {name.replace("__", "."): _plain(value) for name, value in changes.items()}
    parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    parts |= {name: changes.pop(name) for name in parts.keys() & changes.keys()}
    task = _task_of(parts["data"], parts["segments"])
    name = changes.get("model.name", parts["model"].name)
    config_fields.check_value("model.name", name, "", Limits(""))
    given = parts["model"].given if name == parts["model"].name else {}
    model = parts["model"] = Model(name, kind=parts["data"].kind, **given)
    fields = _flat(_to_dict(parts))
    names = fields.keys() | _declared(task) | {f"model.{option}" for option in model.limits}
    for field in changes:
      _check_name(field, names, task)
    return Config.from_dict(
      {"task": task} | traverse_util.unflatten_dict(fields | changes, sep=".")
    )

  def check_name(self, name: str) -> None:
    """Refuses (ValueError) a field that the config does not have."""
    _check_name(name, self.declared.keys() | self.fields.keys(), self.task)

  # Files.

  def to_dict(self) -> dict[str, Any]:
    """Nested fields in JSON types (and tuples), for files."""
    parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    fields = {"task": self.task, **_to_dict(parts)}
    return fields if self.data_root else {k: v for k, v in fields.items() if k != "data_root"}

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`, for files, which may be of an earlier version.

    Absent fields have their defaults, and fields that this version does not have are left out. No
    extension is imported.

    Raises:
      ValueError: an impossible value.
    """
    if (task := fields.get("task")) not in TASKS:
      raise ValueError(f"task is {task!r}, expected one of {', '.join(TASKS)}")
    kinds = _sections(task)
    sections: dict[str, Any] = {
      name: kind.from_dict(fields.get(name, {})) for name, kind in kinds.items()
    }
    plain = {name: fields[name] for name in (*limits_of(Config), "data_root") if name in fields}
    model = Model(kind=sections["data"].kind, **fields["model"])
    return cls(model=model, **plain, **sections)

  # Contradictions across sections.

  def check(self) -> None:
    """Refuses (ValueError) values that contradict each other across sections."""
    if self.model.name in base.MODELS[self.kind] or not self.extensions:
      base.check_options(self.kind, self.model.name, self.model.given)
    batch, data = self.batch, self.data
    _ = self.profiled_steps  # refuses another form
    if self.kind == "layout" and data.source != datasets.OWN:
      if data.search not in ("random", "default"):
        raise ValueError(f"data.search is {data.search!r}, expected random or default")
    if batch.config_chunk and batch.configs % batch.config_chunk:
      raise ValueError(
        f"batch.config_chunk is {batch.config_chunk}, expected a divisor of "
        f"batch.configs, which is {batch.configs}, or 0"
      )
    for name, _ in self.loss.weighted:
      if name in losses.NEED_POSITIVE_LABELS and batch.target not in ("official", "absolute"):
        raise ValueError(
          f"loss.losses has {name}, which needs runtimes, and batch.target is "
          f"{batch.target!r}: set it to official or absolute"
        )
    if self.segments is not None:
      self._check_segments(self.segments)
    if isinstance(data, LayoutDataOptions) and data.also:
      self._check_also(data)

  @property
  def profiled_steps(self) -> tuple[int, int]:
    """The first step of the trace and the step after its last one; equal without a trace.

    Raises:
      ValueError: `profile_steps` has another form.
    """
    match = re.fullmatch(r"(\d+):(\d+)", self.profile_steps or "0:0")
    first, last = map(int, match.groups()) if match else (0, 0)
    if self.profile_steps and not first < last:
      raise ValueError(
        f"profile_steps is {self.profile_steps!r}, expected first:last such as '10:20'"
      )
    return first, last

  def _check_also(self, data: LayoutDataOptions) -> None:
    kinds = {datasets.Collection(name).kind for name in data.also}
    names = {self.collection.name, *data.also}
    if len(names) <= len(data.also) or kinds != {"layout"}:
      raise ValueError(
        f"data.also is {data.also}, expected different layout collections other "
        f"than {self.collection.name}, which the config names"
      )
    if self.segments is not None:
      raise ValueError(
        f"data.also is {data.also}, but Graph Segment Training takes one "
        "collection: take the variant full, or leave data.also empty"
      )

  def _check_segments(self, segments: SegmentOptions) -> None:
    if self.data.virtual_node != "none":
      raise ValueError(
        f"data.virtual_node is {self.data.virtual_node!r}, but segments have no "
        "edges between them: set it to 'none', or train on whole graphs"
      )
    if not self.batch.drop_remainder:
      raise ValueError(
        "batch.drop_remainder is False, but training on segments needs full batches: "
        "set it to True, or train on whole graphs (variant full)"
      )
    if self.batch.config_chunk:
      raise ValueError(
        "batch.config_chunk does not go with segments, which bound memory already: set it to 0"
      )
    if segments.finetune.epochs and segments.readout == "scalar":
      raise ValueError(
        "segments.finetune.epochs needs segments.readout=embedding: with scalar the "
        "head comes before the sum over segments"
      )
    if segments.finetune.epochs and self.train.valid_sampling == "slates":
      raise ValueError(
        "train.valid_sampling is 'slates', but segments.finetune.epochs needs equal "
        "configurations in every evaluation: set it to fixed"
      )


def _task_of(data: TileDataOptions | LayoutDataOptions, segments: SegmentOptions | None) -> str:
  return data.kind if segments is None else "segments"


def _sections(task: str) -> dict[str, type[Options]]:
  """The class of each section by name, but for the model."""
  is_tile = task == "tile"
  sections: dict[str, type[Options]] = {
    "data": TileDataOptions if is_tile else LayoutDataOptions,
    "batch": BatchOptions,
    "segments": SegmentOptions,
    "loss": LossOptions,
    "optimizer": Optimizer,
    "train": TrainOptions,
    "eval": EvalOptions if is_tile else LayoutEvalOptions,
  }
  return {name: kind for name, kind in sections.items() if name != "segments" or task == name}


def _declared(task: str) -> dict[str, tuple[Any, Limits]]:
  """Default and limits of all fields by name, but for the model."""
  fields = dict(limits_of(Config))
  for name, kind in _sections(task).items():
    fields |= kind.limits_by_name(name)
  return fields


def _to_dict(parts: Mapping[str, Any]) -> dict[str, Any]:
  """Sections and fields as nested fields; without sections that are None."""
  as_dict = lambda part: part.to_dict() if isinstance(part, Model) else dataclasses.asdict(part)
  is_section = lambda part: isinstance(part, (Model, Options))
  given = {name: part for name, part in parts.items() if part is not None}
  return {name: as_dict(part) if is_section(part) else part for name, part in given.items()}


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
  return traverse_util.flatten_dict(dict(fields), keep_empty_nodes=True, sep=".")


def _check_name(name: str, names: Collection[str], task: str) -> None:
  """Refuses (ValueError) a field that is none of `names`."""
  if name not in names:
    near = config_fields.nearest(name, [*sorted(names), *(_sections(task).keys() - {name})])
    raise ValueError(f"the config has no field {name!r}; {near}--print_config lists all fields")


def _plain(value: Any) -> Any:
  """Scalars and arrays of NumPy and jax as Python's, lists as tuples."""
  value = value.tolist() if hasattr(value, "tolist") else value
  return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
