"""The sections of a config that rankers read."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from tpugraphs_jax import collections
from tpugraphs_jax.data import features, plan, reduction, selection
from tpugraphs_jax.options import option
from tpugraphs_jax.rankers.scorer import EvalOptions


@dataclasses.dataclass(frozen=True)
class _Data(features.FeatureOptions, plan.LoadingOptions, collections.CollectionOptions):
  neighbour_slots: int = option(
      -1, "width of neighbour tables; 0 = sorted segment sum; -1 = by platform", least=-1)


@dataclasses.dataclass(frozen=True)
class TileData(_Data, selection.TileOptions, reduction.VirtualNodes):
  """The section `data` for kernels."""


@dataclasses.dataclass(frozen=True)
class LayoutData(_Data, selection.LayoutOptions, reduction.Reduction):
  """The section `data` for whole programs."""

  also: tuple[str, ...] = option((), "further layout collections to train on")


@dataclasses.dataclass(frozen=True)
class LayoutEval(EvalOptions, selection.JudgedOptions):
  """The section `eval` for whole programs."""


TASKS = ("tile", "layout", "segments")
DATA: dict[str, type[TileData] | type[LayoutData]] = {
    "tile": TileData, "layout": LayoutData, "segments": LayoutData}
EVAL: dict[str, type[EvalOptions]] = {
    "tile": EvalOptions, "layout": LayoutEval, "segments": LayoutEval}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Fields of a config for preparing, batching and scoring graphs.

  Attributes:
    task: one of `TASKS`.
    seed: of parameters, batches and samples.
    data, batch, eval: sections.
    model: name of the network.
    segments: fields of the section `segments`; empty for other tasks.
  """

  task: str
  seed: int
  data: TileData | LayoutData
  batch: plan.BatchOptions
  eval: EvalOptions
  model: str
  segments: Mapping[str, Any]

  @classmethod
  def of(cls, config: Mapping[str, Any]) -> Settings:
    """The settings in the nested fields of a config.

    Raises:
      ValueError: an impossible value, with the name of its field.
    """
    task = config["task"]
    return cls(
        task=task, seed=config["seed"], data=DATA[task].of(config["data"]),
        batch=plan.BatchOptions.of(config["batch"]), eval=EVAL[task].of(config["eval"]),
        model=config["model"]["name"], segments=config.get("segments", {}))

  @property
  def kind(self) -> str:
    """The kind of configurations, `tile` or `layout`."""
    return "tile" if self.task == "tile" else "layout"
