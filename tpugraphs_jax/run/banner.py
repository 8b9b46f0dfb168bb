"""What a training run is about to do, on a page of a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
import types
from typing import Any

import jax
import ml_collections

from tpugraphs_jax.collections import Collection, label_kind
from tpugraphs_jax.run import phases
from tpugraphs_jax.serve import judge


def lines(
    config: ml_collections.ConfigDict, collection: str, phase: phases.Phase,
    train: Sequence[Any], valid: Sequence[Any], workdir: Path, *,
    also: Mapping[str, int] = types.MappingProxyType({}),
) -> str:
  """The page.

  Args:
    config: of the run, with `data_root`.
    collection: its name.
    phase: the first one.
    train: prepared graphs.
    valid: prepared graphs.
    workdir: the working folder.
    also: other collections of the same network, and how many graphs train it.
  """
  batch, steps = config.batch, phase.plan.steps_per_epoch
  rows = {
      "task": f"{config.task}, collection {collection}",
      "data": f"{config.data_root}",
      "labels": label_kind(config.data_root, Collection(collection)),
      "training": "; ".join([_sizes(train), *(
          f"{count:,} graphs of {name}" for name, count in also.items())]),
      "validation": f"{_sizes(valid)}; {_judged(config)}",
      "model": f"{config.model.name}, {parameters(phase):,} parameters, {_arithmetic(config)}",
      "devices": _devices(),
      "steps": f"{phase.epochs * steps:,} in {phase.epochs} epochs of {steps:,}, each of "
               f"{batch.graphs} graphs with {batch.configs} configurations",
      "folder": f"{workdir}, seed {config.seed}",
  }
  return "\n".join(f"{name:<11}{text}" for name, text in rows.items())


def _sizes(graphs: Sequence[Any]) -> str:
  configs, nodes = sum(len(g.configs) for g in graphs), [len(g.opcode) for g in graphs]
  return f"{len(graphs):,} graphs of {min(nodes):,} to {max(nodes):,} nodes, " \
         f"{configs:,} configurations"


def _judged(config: ml_collections.ConfigDict) -> str:
  count = config.train.valid_configs
  of_each = f"a seeded {count} of each graph" if count else "all of them"
  return f"judged by {judge.mean_name(config.train.best_metric)} on {of_each}"


def parameters(phase: phases.Phase) -> int:
  """How many numbers the model of a phase learns."""
  return sum(leaf.size for leaf in jax.tree.leaves(phase.state.params))


def _arithmetic(config: ml_collections.ConfigDict) -> str:
  model = config.model
  return f"{model.get('dtype', 'float32')}, matrix products {model.get('precision', 'default')}"


def _devices() -> str:
  devices = jax.devices()
  text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
  return text + f" in {jax.process_count()} processes" * (jax.process_count() > 1)
