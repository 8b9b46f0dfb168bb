"""Training and scoring steps of any config on random graphs, to lower and compile without data."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from tpugraphs_jax.columns import NODE_FEATURES, TILE_CONFIG_FEATURES
from tpugraphs_jax.data import features
from tpugraphs_jax.graph import OpGraph, TileConfigs
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.late_join import LateJoin
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.rankers.scorer import network_step
from tpugraphs_jax.rankers.segments import batches
from tpugraphs_jax.rankers.segments.family import Segments
from tpugraphs_jax.rankers.tables.family import TablesFamily
from tpugraphs_jax.train import training
from tpugraphs_jax.train.step import TrainState

STEPS = ("train", "score")
# Methods of networks that are scored in two parts.
_ENCODERS = {TablesFamily: "tables", Segments: "segment_readout", LateJoin: "kernel_features"}
_KERNEL_NODES = 40
_PRODUCT = re.compile(
  r"stablehlo\.(?:dot_general|convolution).*?precision(?:_config)? = \[([^\]]*)\]"
)


def lower(
  config: Config, step: str, devices: Sequence[jax.Device], *, nodes: int
) -> jax.stages.Lowered:
  """A step of a config, for all of these devices.

  Args:
    config: its `batch.graphs` is the number of graphs on each device.
    step: one of `STEPS`.
    devices: of a machine or of a topology to compile for.
    nodes: of each program; kernels have 40.
  """
  mapped, arguments = _step(config, step, devices, nodes)
  add_devices = lambda tree: jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct((len(devices), *leaf.shape), leaf.dtype), tree
  )
  # All arguments but the seed of a training step have an axis of devices.
  first = 1 if step == "train" else 0
  return mapped.lower(*arguments[:first], *map(add_devices, arguments[first:]))


def products(lowered: jax.stages.Lowered) -> collections.Counter[str]:
  """How many products and convolutions a lowered step has, by their precision in lower case.

  Where both operands have one precision it stands alone, else as `highest, default`. The body of
  a loop counts once.
  """
  counts = collections.Counter()
  for product in _PRODUCT.findall(lowered.as_text()):
    counts[", ".join(dict.fromkeys(re.findall(r"HIGHEST|HIGH|DEFAULT", product))).lower()] += 1
  return counts


def _step(
  config: Config, step: str, devices: Sequence[jax.Device], nodes: int
) -> tuple[Any, list[Any]]:
  """A step mapped over devices, and its arguments (arrays or shapes) for one device."""
  graphs = config.batch.graphs * parallel.device_count()  # a batch has one device's share
  configs = config.eval.configs if step == "score" else config.batch.configs
  config = config.replace(batch__graphs=graphs, batch__configs=configs)
  ranker = Ranker(config)
  graph = _graph(config, nodes)
  if config.kind == "tile":
    blocks = config.data.config_features
    raw = features.with_config_features(graph, blocks).configs.config_feat
  else:
    raw = graph.configs.rows
  ranker.features.fit([graph])
  ranker.fit_configs([raw])
  family = ranker.family
  graphs = [ranker.prepare(graph)] * config.batch.graphs
  targets = lambda configs, ids: configs.labels[ids].astype(np.float32)
  phase = dataclasses.replace(family.first_phase(graphs, Path()), epochs=1)
  plan = training.plan_batches(phase, targets)
  sizes = dict(graphs=plan.slates_per_device, configs=config.batch.configs)
  batch = family.assemble(plan.slates(0, 0), plan.budget(0), **sizes)
  params = jax.eval_shape(family.network.init, jax.random.key(0), batch)["params"]
  if step == "score":
    mapped = network_step(family.network, method=_ENCODERS.get(type(family)), devices=devices)
    return mapped, [params, batch.fresh if isinstance(family, Segments) else batch]
  if isinstance(family, Segments):
    batch = _with_stale(ranker, params, batch, graphs[0])
  optimizer = family.constrain(config.optimizer.create(1000))
  mapped = training.make_step(config, family.network, optimizer, devices)
  state = jax.eval_shape(
    lambda: TrainState.create(
      jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params), optimizer
    )
  )
  return mapped.func, [*mapped.args, state, batch]


def _graph(config: Config, nodes: int) -> OpGraph:
  """A random program of `nodes` nodes or, for tiles, a random kernel of 40 nodes."""
  rng = np.random.default_rng(0)
  configs = max(config.batch.configs, config.eval.configs)
  if config.kind != "tile":
    return workloads.program(rng, nodes=nodes, config_nodes=nodes // 20, configs=configs)
  tiles = TileConfigs(
    config_feat=rng.random((configs, TILE_CONFIG_FEATURES), np.float32),
    runtime_ns=rng.integers(1, 1000, configs),
    normalizer_ns=np.full(configs, 500),
  )
  return OpGraph(
    name="kernel",
    node_feat=rng.random((_KERNEL_NODES, NODE_FEATURES), np.float32),
    node_opcode=rng.integers(1, 120, _KERNEL_NODES).astype(np.uint8),
    edge_index=workloads.edges(rng, _KERNEL_NODES),
    node_splits=np.array([0, _KERNEL_NODES]),
    config_node=np.zeros(0, np.int32),
    configs=tiles,
  )


def _with_stale(ranker: Ranker, params: Any, batch: Any, graph: Any) -> Any:
  """A batch with the shapes of stale readouts `[G, C, segments, width]` and their mask."""
  readout = lambda params, part: ranker.family.network.apply(
    {"params": params}, part, method="segment_readout"
  )
  width = jax.eval_shape(readout, params, batch.fresh).shape[-1]
  shape = (*batch.target.shape, len(graph.segments))
  stale = batches.Stale(
    jax.ShapeDtypeStruct((*shape, width), jnp.float32), jax.ShapeDtypeStruct(shape, bool)
  )
  return batch._replace(stale=stale)
