"""Compiles training and scoring steps of every model family for TPUs, on a machine without one.

    pip install ".[tpu]"
    python benchmarks/tpu_compile.py
    python benchmarks/tpu_compile.py --targets v3 --cases SAGE

Each step is compiled in a process of its own, for all devices of the smallest topology
of a generation, with one program or ten kernels per device. `compile_s` is measured. Cycles
and optimal milliseconds are estimates of the TPU compiler; nothing runs on a TPU.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

import run_all
import timing
import workloads
from tpugraphs_jax.columns import NODE_FEATURES, TILE_CONFIG_FEATURES
from tpugraphs_jax.data import batching, feature_blocks
from tpugraphs_jax.graph import OpGraph, TileConfigs
from tpugraphs_jax.hlo import proto, tpu, tpu_kernels
from tpugraphs_jax.rankers.scorer import network_step
from tpugraphs_jax.rankers.segments import batches as segments
from tpugraphs_jax.run import configs, published, training
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import state as state_lib

# Config and changed fields, by the name of a case.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tile": ("tile.py:recommended", {}),
    "ResModel": ("layout.py:xla-random,official", {}),
    "SAGE": ("layout.py:xla-random,full", {}),
    "tables": ("layout.py:xla-random,tables", {}),
    "gst_ed": ("layout.py:xla-random,gst_ed", {}),
}
# Changed fields by way to sum over neighbours; `xla-random,full` is compiled with each.
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "tables of 4 slots": {"data.neighbour_slots": 4},
    "sorted segment sums": {"data.neighbour_slots": 0},
    "sorted segment sums, bfloat16": {"data.neighbour_slots": 0, "model.dtype": "bfloat16",
                                      "model.precision": "default"},
}
# Small cases for tests, which compile in seconds.
SMALL = {"tile, small": ("tile.py:recommended,ci", {}),
         "SAGE, small": ("layout.py:xla-random,full,ci", {})}
# Cases to compare with each other: compiled for TPU v3 alone, or for the one target given.
V3_ONLY = {f"SAGE, {name}": ("layout.py:xla-random,full", changes)
           for name, changes in AGGREGATIONS.items()}
V3_ONLY |= {f"{kind}, {configs.PRESET}{name}": (f"{kind}.py:{configs.PRESET}{name}", {})
            for kind, known in (("layout", published.LAYOUTS), ("tile", published.TILES))
            for name in known}
CASES |= V3_ONLY
TARGETS = ("v3", "v4", "v5e", "v6e")
STEPS = ("train", "score")
# GiB of memory of a chip. The smallest topology of each generation has four chips.
_CHIP_GIB = {"v2": 16, "v3": 32, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
_CHIPS = 4
_NODES, _SMALL_NODES, _KERNELS, _KERNEL_NODES = 6_000, 200, 10, 40


def config_of(case: str) -> ml_collections.ConfigDict:
  """The config of a case, for one program or ten kernels per device."""
  name, changes = (CASES | SMALL)[case]
  config = configs.load(name)
  config.update_from_flattened_dict({"data.neighbour_slots": batching.slots_of("tpu")} | changes)
  config.batch.graphs = _KERNELS if config.task == "tile" else 1
  return config


def graph_of(config: ml_collections.ConfigDict, nodes: int) -> OpGraph:
  """A random program of `nodes` nodes or, for tiles, a random kernel of 40 nodes."""
  rng = np.random.default_rng(0)
  if config.task != "tile":
    return workloads.program(rng, nodes=nodes, config_nodes=nodes // 20,
                             configs=max(config.batch.configs, config.eval.configs))
  configs = max(config.batch.configs, config.eval.configs)
  tiles = TileConfigs(
      config_feat=rng.random((configs, TILE_CONFIG_FEATURES), np.float32),
      runtime_ns=rng.integers(1, 1000, configs), normalizer_ns=np.full(configs, 500))
  return OpGraph(
      name="kernel", node_feat=rng.random((_KERNEL_NODES, NODE_FEATURES), np.float32),
      node_opcode=rng.integers(1, 120, _KERNEL_NODES).astype(np.uint8),
      edge_index=workloads.edges(rng, _KERNEL_NODES),
      node_splits=np.array([0, _KERNEL_NODES]), config_node=np.zeros(0, np.int32), configs=tiles)


def step_and_arguments(case: str, step: str, devices: list[Any]) -> tuple[Any, list[Any]]:
  """A step mapped over devices, and its arguments (arrays or shapes) for one device."""
  config = config_of(case)
  if step == "score":
    config.batch.configs = config.eval.configs
  ranker = Ranker(config.to_dict())
  graph = graph_of(config, _SMALL_NODES if case in SMALL else _NODES)
  if config.task == "tile":
    values = feature_blocks.extended(graph, config.data.config_features).configs.config_feat
  else:
    values = graph.configs.rows
  ranker.fit([graph], [values])
  graphs = [ranker.prepare(graph)] * config.batch.graphs
  targets = lambda configs, ids: configs.runtime_ns[ids].astype(np.float32)
  part = training.Part(config, ranker.family, graphs, targets)
  plan = training.plan_of(part, epochs=1)
  batch = training.first_batch(part, plan)
  params = jax.eval_shape(ranker.family.network.init, jax.random.key(0), batch)["params"]
  if step == "score":
    return _score_step(ranker, devices), [params, _scored(ranker, batch)]
  optimizer = state_lib.create_optimizer(total_steps=1000, **config.optimizer)
  sown = ranker.family.sown
  if sown:
    batch = _with_stale(ranker, params, batch, graphs[0])
  mapped = training.make_step(config, ranker.family.network, optimizer, sown=sown, devices=devices)
  state = jax.eval_shape(lambda: state_lib.TrainState.create(
      jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params), optimizer))
  return mapped.func, [*mapped.args, state, batch]


def _score_step(ranker: Ranker, devices: list[Any]) -> Any:
  """The step with which a ranker scores a batch on each device."""
  family = ranker.family
  return network_step(family.network, method=family.encodes, devices=devices)


def _scored(ranker: Ranker, batch: Any) -> Any:
  return batch.fresh if ranker.family.sown else batch


def _with_stale(ranker: Ranker, params: Any, batch: Any, graph: Any) -> Any:
  """A batch with the shapes of stale readouts `[G, C, segments, width]` and their mask."""
  readout = lambda params, part: ranker.family.network.apply(
      {"params": params}, part, method="segment_readout")
  width = jax.eval_shape(readout, params, batch.fresh).shape[-1]
  shape = (*batch.target.shape, len(graph.segments))
  stale = segments.Stale(jax.ShapeDtypeStruct((*shape, width), jnp.float32),
                         jax.ShapeDtypeStruct(shape, bool))
  return batch._replace(stale=stale)


def measure(case: str, step: str, target: str) -> dict[str, Any]:
  """Compiles a step for all devices of a target; returns the compiler's figures."""
  devices = tpu.devices(f"tpu:{target}")
  mapped, arguments = step_and_arguments(case, step, devices)
  is_seeded = step == "train"
  shapes = [argument if is_seeded and not place else _on_all(argument, len(devices))
            for place, argument in enumerate(arguments)]
  lowered = mapped.lower(*shapes)
  started = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - started
  module = proto.parse_module(
      compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto(),
      where="TPU program")
  opcodes = collections.Counter(
      node.opcode for computation in module.computations for node in computation.instructions)
  cycles, memory = tpu_kernels.estimated_cycles(module), compiled.memory_analysis()
  total = (memory.argument_size_in_bytes + memory.output_size_in_bytes
           + memory.temp_size_in_bytes - memory.alias_size_in_bytes)
  return {
      "devices": len(devices), "compile_s": seconds,
      "code_mb": memory.generated_code_size_in_bytes / 1e6,
      "memory_mib": total / 2**20, "core_gib": _CHIP_GIB[target] * _CHIPS / len(devices),
      "estimated_cycles": cycles.cycles, "kernels_without_estimate": cycles.without_estimate,
      "optimal_ms": 1e3 * compiled.cost_analysis()["optimal_seconds"],
      "gathers": opcodes["gather"], "scatters": opcodes["scatter"],
  }


def _on_all(tree: Any, devices: int) -> Any:
  return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct((devices, *leaf.shape), leaf.dtype), tree)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
  """The recorded steps as a Markdown table."""
  lines = ["| step | TPU | compile | code | memory of a core | estimated cycles | "
           "optimal | gathers | scatters |", "|---|---|---|---|---|---|---|---|---|"]
  for name, row in results.items():
    if name == "machine":
      continue
    case, step, target = name.split("/")
    if "error" in row:
      lines.append(f"| {case}, {step} | {target} | {row['error']} |" + " |" * 6)
      continue
    lines.append(
        f"| {case}, {step} | {target} | {row['compile_s']:.0f} s | {row['code_mb']:.1f} MB | "
        f"{row['memory_mib']:,.0f} MiB of {row['core_gib']:.0f} GiB | "
        f"{_cycles(row)} | {_optimal(row)} | "
        f"{row['gathers']} | {row['scatters']} |")
  return "\n".join(lines)


def _cycles(row: Mapping[str, Any]) -> str:
  missing = row.get("kernels_without_estimate", 0)
  unknown = f", {missing} kernels unknown" if missing else ""
  return f"{row['estimated_cycles'] / 1e6:.2f} M{unknown}"


def _optimal(row: Mapping[str, Any]) -> str:
  """The estimate of a step; negative seconds mean that a part of it has no estimate."""
  return f"{row['optimal_ms']:.2f} ms" if row["optimal_ms"] > 0 else "unknown"


def in_own_process(case: str, step: str, target: str) -> dict[str, Any]:
  """`measure` in a fresh process; `error` is a line of its output if it failed."""
  ended = subprocess.run(
      [sys.executable, __file__, "--only", case, step, target], capture_output=True, text=True,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"})
  if ended.returncode:
    return {"error": _why(ended.stderr)}
  return json.loads(ended.stdout.splitlines()[-1])


def _why(message: str) -> str:
  """The last line of standard error that names an exception, or the last line."""
  lines = message.strip().splitlines() or ["no message"]
  named = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
  return (named or lines)[-1][:200]


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
  parser.add_argument("--cases", nargs="+", default=list(CASES),
                      choices=[*CASES, *SMALL])
  parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS)
  parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.only:
    print(json.dumps(measure(*args.only)))
    return
  results = {}
  for case in args.cases:
    for step in args.steps:
      for target in args.targets:
        if case in V3_ONLY and target != "v3" and len(args.targets) > 1:
          continue
        results[f"{case}/{step}/{target}"] = in_own_process(case, step, target)
        print(table({f"{case}/{step}/{target}": results[f"{case}/{step}/{target}"]})
              .splitlines()[-1], flush=True)
  if args.out:
    timing.write(results, args.out)
  else:
    run_all.record("tpu_compile", results)


if __name__ == "__main__":
  main()
