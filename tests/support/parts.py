"""Experiments of configs with some fields changed, parameters of networks and their features."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from tpugraphs_jax.data.plan import BatchPlan
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.nodes import Nodes
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs, variants
from tpugraphs_jax.train import loading, session, training

# The smallest rankers of whole graphs.
VARIANTS = {"tile": "ci", "layout": "full,ci"}
# Fields of a run of two steps.
TINY = {"train.epochs": 1, "batch.graphs": 4, "batch.slates_per_epoch": 8}


def config_of(kind: str, variant: str = "", **changes: Any) -> Config:
  """A config with some fields changed (`**{"batch.graphs": 4}`)."""
  return configs.load(f"{kind}.py:{variant or VARIANTS[kind]}").replace(**changes)


def presets(kind: str) -> list[str]:
  """Names of the variants of published systems."""
  return [name for name in variants.systems(kind) if name.startswith("preset=")]


class Experiment:
  """A config with its ranker and its collections.

  Attributes:
    config: the argument.
    ranker: of the config.
    collections: of the config; `data` is the first one.
  """

  def __init__(self, config: Config):
    self.config, self.ranker = config, Ranker(config)
    self.collections = loading.data_of(config)
    self.data = self.collections[0]

  def fit_transforms(self, graphs: Sequence[OpGraph]) -> None:
    """Fits the transforms of the ranker on training graphs."""
    loading.fit(self.ranker, self.collections, graphs)

  def prepare(self, graphs: Sequence[OpGraph]) -> list[Any]:
    """Graphs as the network takes them."""
    return [self.ranker.prepare(graph) for graph in graphs]

  def load_graphs(self, workdir: Path) -> tuple[list[Any], list[Any]]:
    """Prepared training and validation graphs, as in a new run."""
    return loading.load_graphs(self.ranker, self.collections, workdir, resume=False)

  def plan(self, graphs: Sequence[Any], **changes: Any) -> BatchPlan:
    """The plan of batches of prepared training graphs; `changes` are fields of the phase."""
    phase = dataclasses.replace(self.ranker.family.first_phase(graphs, Path()), **changes)
    return training.plan_batches(phase, self.data.targets)

  def begin(self, graphs: Sequence[Any], workdir: Path) -> session.Training:
    """First state, step, batches and timetable of training on prepared graphs."""
    phase = self.ranker.family.first_phase(graphs, workdir)
    return training.begin(phase, training.plan_batches(phase, self.data.targets))


def make(kind: str, variant: str = "", **changes: Any) -> Experiment:
  """The experiment of a config with some fields changed."""
  return Experiment(config_of(kind, variant, **changes))


# One program. Outside of `jit`, each operation would be compiled by itself.
everywhere = jax.jit(Nodes.everywhere)


def params_of(network: Any, batch: Any, seed: int = 0, scale: float = 0.3) -> Any:
  """Normal numbers as parameters, biases too. Scalars are above 0.5: one may be a divisor."""
  shapes = jax.eval_shape(network.init, jax.random.key(0), batch)["params"]
  rng = np.random.default_rng(seed)
  draw = lambda shape: rng.normal(0, scale, shape) if shape else 0.5 + rng.random()
  return jax.tree.map(lambda leaf: np.asarray(draw(leaf.shape), np.float32), shapes)


def replicate(tree: Any, devices: int) -> Any:
  """Copies every array onto the first devices, as a run does: a later step compiles nothing."""
  first = jax.local_devices()[:devices]
  with mock.patch.object(jax, "local_devices", lambda: first):
    return parallel.replicate(tree)
