"""Experiments of configs with some fields changed, parameters of networks and their features."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import numpy as np

from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.nodes import Nodes
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.run import configs, variants
from tpugraphs_jax.train.experiment import Experiment

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


def make(kind: str, variant: str = "", **changes: Any) -> Experiment:
  """The experiment of a config with some fields changed."""
  return Experiment.of(config_of(kind, variant, **changes))


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
