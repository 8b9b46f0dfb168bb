"""A training step of every preset's model, shared and as plain copies.

    python benchmarks/systems_step.py --out systems_step.json --table systems_step.md

The same parameters and the same mathematics in both: `share=False` carries every
configuration of every node through all layers, `[N, C, F]`. Layouts: programs of 2,000
nodes with 80 configurable ones; tiles: kernels of 40 nodes, of which a quarter are distinct
in what tokens say of them, as of released kernels. Slates are those of the presets, and at
most so many graphs as `--graphs` says. Every figure comes from a fresh
process, the median of some steps after one that is not counted. A form that does not fit
in memory has no figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tpugraphs_jax import host_memory, losses as losses_lib, parallel
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.data.batching import TileBatch
from tpugraphs_jax.graph import OpGraph, TileConfigs
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.composed import inputs
from tpugraphs_jax.run import configs, published
from tpugraphs_jax.train import log, state as state_lib, step as step_lib
import timing
import workloads

FORMS = ("plain", "shared")
PRESETS = {"layout": tuple(published.LAYOUTS), "tile": tuple(published.TILES)}
RATIOS = ("step_s", "planned_mib", "peak_mib")
_NODES = {"layout": 2_000, "tile": 40}
_NODES_PER_CHOICE = 25  # of layouts


def model_of(kind: str, preset: str, variants: str, form: str) -> tuple[Any, Any]:
  """The ranker of a preset in one form, and its config."""
  config = configs.load(f"{kind}.py:" + ",".join(filter(None, (configs.PRESET + preset, variants))))
  options = config.model.to_dict() | {"share": form == "shared"}
  return base.create_network(kind, options.pop("name"), **options), config


def batch_of(kind: str, model: Any, *, graphs: int, slate: int, nodes: int):
  """Random programs or kernels, a slate of each, with the features that the model reads."""
  rng, chosen = np.random.default_rng(0), []
  for number in range(graphs):
    graph = workloads.program(
        rng, nodes=nodes, config_nodes=max(1, nodes // _NODES_PER_CHOICE), configs=slate)
    feat = np.concatenate([graph.node_feat, *(
        rng.integers(-1, 6, (nodes, inputs.READ_BLOCKS[name])) for name in model.reads)],
        axis=1).astype(np.float32)
    if kind == "tile":
      graph = _as_kernel(rng, graph, slate)
      if "dimension_tokens" in model.reads:
        width = sum(inputs.READ_BLOCKS[name] for name in model.reads)
        feat[:, -width:] = feat[rng.integers(-(-nodes // 4), size=nodes), -width:]
    prepared = batching.prepare(
        graph, feat, hops=None if kind == "tile" else model.hops,
        distinct=model.distinct if kind == "tile" else 0)
    target = graph.configs.runtime_ns.astype(np.float32) / 1e7
    chosen.append(batching.Slate(prepared, np.arange(slate), target, number))
  budget, = plan.choose_budgets([batching.total_sizes([slate.graph for slate in chosen])])
  assemble = batching.assemble_tile if kind == "tile" else batching.assemble_layout
  return assemble(chosen, budget, graphs=graphs, configs=slate,
                  transform=lambda rows: rows.astype(np.float32))


def _as_kernel(rng: np.random.Generator, graph: OpGraph, slate: int) -> OpGraph:
  tiles = TileConfigs(
      rng.random((slate, 24), np.float32), rng.integers(10**6, 10**7, slate),
      np.full(slate, 10**6))
  return OpGraph(graph.name, graph.node_feat, graph.node_opcode, graph.edge_index,
                 graph.node_splits, np.zeros(0, np.int32), tiles)


def measure(args: argparse.Namespace) -> dict[str, float]:
  """Median seconds of a step of one form, and MiB: XLA's plan for it, and this process's peak."""
  model, config = model_of(args.kind, args.preset, args.variants, args.form)
  batch = batch_of(args.kind, model, graphs=min(config.batch.graphs, args.graphs),
                   slate=min(config.batch.configs, args.slate),
                   nodes=args.nodes or _NODES[args.kind])
  device_batch = jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf)[None], batch))
  params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
  optimizer = state_lib.create_optimizer(total_steps=1000)
  state = parallel.replicate(state_lib.TrainState.create(params, optimizer))
  step = step_lib.make_train_step(
      model, optimizer, step_lib.Objective(losses_lib.parse_losses("ListMLELoss:1")))
  compiled = step.func.lower(*step.args, state, device_batch).compile()
  seconds = []
  for _ in range(args.repeats + 1):
    started = time.perf_counter()
    state, metrics = compiled(*step.args, state, device_batch)
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - started)
  return {"step_s": float(np.median(seconds[1:])), "planned_mib": timing.planned_mib(compiled),
          "peak_mib": log.peak_memory()[1] / 2**20,
          "loss": float(parallel.unreplicate(metrics)["loss"]),
          "nodes": int(batch.graph.n_node[:-1].sum()), "configs": int(batch.config_mask.shape[1]),
          "is_tile": float(isinstance(batch, TileBatch))}


def compare(args: argparse.Namespace, kind: str, preset: str) -> dict[str, float]:
  """Both forms of a preset, each in a process of its own, and their ratios."""
  figures: dict[str, float] = {}
  for form in FORMS:
    flags = ["--kind", kind, "--preset", preset, "--form", form, "--graphs", str(args.graphs),
             "--slate", str(args.slate), "--nodes", str(args.nodes), "--variants", args.variants,
             "--repeats", str(args.repeats)]
    try:
      found = timing.in_subprocess("systems_step.py", *flags)
    except subprocess.CalledProcessError as error:
      print(f"{kind} {preset} {form}: ended with exit code {error.returncode}", flush=True)
      continue
    figures |= {f"{form}_{name}": value for name, value in found.items()}
  for name in RATIOS:
    if {f"{form}_{name}" for form in FORMS} <= figures.keys():
      figures[f"{name}_ratio"] = figures[f"shared_{name}"] / figures[f"plain_{name}"]
  return figures


def table(results: Mapping[str, Mapping[str, float]]) -> str:
  """Step time and memory of both forms in Markdown, a row per preset."""
  lines = ["| preset | s plain | s shared | time | MiB plain | MiB shared | memory "
           "| peak plain | peak shared |", "|---" * 9 + "|"]
  columns = {"step_s": (".3f", True), "planned_mib": (",.0f", True), "peak_mib": (",.0f", False)}
  for name, row in results.items():
    cells = []
    for figure, (form, with_ratio) in columns.items():
      chosen = {f"plain_{figure}": form, f"shared_{figure}": form}
      chosen |= {f"{figure}_ratio": ".2f"} if with_ratio else {}
      cells += [format(row[key], form) if key in row else "-" for key, form in chosen.items()]
    lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main() -> None:
  parser = timing.parser(__doc__, repeats=3)
  parser.add_argument("--kind", choices=PRESETS, help="with --preset and --form: this one alone")
  parser.add_argument("--preset", help="name of a preset")
  parser.add_argument("--form", choices=FORMS, help="measure this form in this process")
  parser.add_argument("--presets", nargs="+", help="compare these alone, such as layout:first")
  parser.add_argument("--variants", default="", help="further variants of the configs")
  parser.add_argument("--graphs", type=int, default=2, help="most graphs in a step")
  parser.add_argument("--slate", type=int, default=32, help="most configurations in a slate")
  parser.add_argument("--nodes", type=int, default=0, help="of a graph, 0 = as described")
  parser.add_argument("--table", type=Path, help="also write the table as Markdown")
  args = parser.parse_args()
  if args.form:
    timing.write(measure(args), args.out)
    return
  names = args.presets or [f"{kind}:{name}" for kind, found in PRESETS.items() for name in found]
  results = {name: compare(args, *name.split(":")) for name in names}
  print(table(results))
  timing.write({"machine": timing.machine(), **results}, args.out)
  if args.table:
    args.table.write_text(table(results) + "\n")


if __name__ == "__main__":
  host_memory.keep_freed()
  main()
