"""Speed and memory of score tables: training steps and ranking of very many configurations.

    python benchmarks/tables.py --out tables.json

training       a step on 8 programs of 6,000 nodes, 250 of them configurable, with 256
               configurations each
sage_training  a step of GraphSAGE on programs of these sizes with 16 configurations each
ranking        100,000 configurations of a program of 10,000 nodes, 500 of them configurable:
               finding the choices, running the network and adding up the costs
sage_ranking   1,000 configurations of such a program by GraphSAGE
split          all configurations of programs with the sizes of layout:xla:default
few, many      ranking of 1,000 and of 100,000 configurations, for their peak memory
pairs          finding the pairs of configurable nodes in a program of 43,615 nodes, the size
               of the largest released one

GraphSAGE is `xla-random,full`. Each case runs in a process of its own, whose peak memory is
recorded.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import timing
import workloads

from configs import layout as layout_config
from tpugraphs_jax import losses as losses_lib
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.tables import batches as table_batching
from tpugraphs_jax.rankers.tables import node_pairs, terms
from tpugraphs_jax.rankers.tables.network import ScoreTables
from tpugraphs_jax.run import job as job_lib
from tpugraphs_jax.run import training
from tpugraphs_jax.train import log

_CASES = ("training", "sage_training", "ranking", "sage_ranking", "split", "few", "many", "pairs")
_LARGEST = 43_615  # nodes of the largest released graph
# Nodes and configurations of the training programs of layout:xla:default, as published.
_SPLIT = (
    (372, 47712), (490, 100040), (650, 100040), (1111, 34200), (1111, 48288), (2774, 1159),
    (4185, 100040), (4748, 15656), (5162, 9176), (5162, 17632), (5279, 9912), (5345, 11400),
    (5358, 7584), (5605, 8552), (5605, 10528), (5670, 6797), (5673, 8632), (5673, 12912),
    (5689, 8560), (5809, 9224), (6136, 12984), (6656, 5304), (7324, 25240), (7324, 27024),
    (7768, 6344), (8636, 12048), (8836, 7592), (8836, 13320), (8847, 5408), (9257, 11104),
    (10092, 7688), (10449, 5688), (12062, 40024), (12069, 10016), (12565, 5820), (13342, 4999),
    (13502, 5192), (13867, 6558), (13867, 6623), (14680, 11960), (15022, 6488), (15022, 7576),
    (15748, 4692), (15809, 10776), (19348, 5471), (19662, 6288), (19662, 7768), (20665, 22496),
    (21126, 18528), (21196, 18992), (21335, 19224), (21338, 19096), (22385, 18200),
    (24790, 6228), (24793, 13216), (25544, 11560), (26234, 15256), (26906, 12920),
    (39452, 9816), (40332, 11152), (43615, 1960))
_LOSSES = losses_lib.parse_losses("ListMLELoss:1")


def prepared(*, nodes: int, config_nodes: int, configs: int, hops: int, seed: int):
  """A random program, prepared with its unary and pair terms."""
  graph = workloads.program(
      np.random.default_rng(seed), nodes=nodes, config_nodes=config_nodes, configs=configs)
  return table_batching.prepare(graph, graph.node_feat, terms.terms_of(graph, hops=hops))


def assembled(programs, configs: int):
  """A batch that just holds these programs with their first `configs` configurations."""
  slates = [batching.Slate(program, np.arange(configs), np.arange(configs, dtype=np.float32))
            for program in programs]
  budget, = plan.choose_budgets([batching.total_sizes(programs)])
  return table_batching.assemble(slates, budget, graphs=len(slates), configs=configs)


def make_step(model, optimizer: optax.GradientTransformation):
  """A compiled training step `(params, moments, batch) -> (params, moments)`."""

  def loss(params, batch):
    found = model.apply({"params": params}, batch, train=True)
    return losses_lib.combine(_LOSSES, *losses_lib.loss_sums(
        _LOSSES, found, batch.target, where=batch.config_mask))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, moments, batch):
    grads = jax.grad(loss)(params, batch)
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments

  return step


def step_seconds(step, state, batch, *, repeats: int):
  """Median seconds of a training step, and `(params, moments)` after the last one."""
  def train():
    nonlocal state
    state = step(*state, batch)
    return state

  seconds = timing.medians({"step": train}, repeats=repeats)["step"]
  return seconds, state


def measure_training(args: argparse.Namespace) -> dict[str, float]:
  """Median seconds of a training step, its sizes and the memory that XLA plans for it."""
  model = ScoreTables(num_gnns=args.rounds, hidden_dim=args.width)
  programs = [prepared(nodes=6_000, config_nodes=250, configs=256, hops=args.hops, seed=seed)
              for seed in range(8)]
  batch = jax.device_put(assembled(programs, 256))
  params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
  optimizer = optax.adamw(1e-3)
  step = make_step(model, optimizer)
  seconds, state = step_seconds(step, (params, optimizer.init(params)), batch, repeats=args.repeats)
  sizes = batching.total_sizes(programs)
  return {"step_s": seconds, "columns": sizes["columns"], "pairs": sizes["pairs"],
          "planned_mib": timing.planned_mib(step.lower(*state, batch).compile())}


def measure_ranking(args: argparse.Namespace) -> dict[str, float]:
  """Median seconds to find choices, make tables and add up the costs of all configurations."""
  model = ScoreTables(num_gnns=args.rounds, hidden_dim=args.width)
  graph = workloads.program(
      np.random.default_rng(0), nodes=10_000, config_nodes=500, configs=100_000)
  tables = jax.jit(functools.partial(model.apply, method="tables"))
  params, seconds = None, {"prepare_s": [], "network_s": [], "sums_s": []}
  for _ in range(args.repeats + 1):
    times = [time.perf_counter()]
    program = table_batching.prepare(graph, graph.node_feat, terms.terms_of(graph, hops=args.hops))
    batch = assembled([program], 1)
    times.append(time.perf_counter())
    if params is None:
      params = jax.jit(model.init)(jax.random.key(0), batch)
    unary, pair = jax.device_get(tables(params, batch))
    times.append(time.perf_counter())
    groups, columns = program.sizes["groups"], program.sizes["columns"]
    program.terms.total(graph.configs.group_row, terms.Costs(
        unary[:groups, :, 0], pair[:columns, ..., 0]))
    times.append(time.perf_counter())
    for name, value in zip(seconds, np.diff(times)):
      seconds[name].append(float(value))
  medians = {name: float(np.median(values[1:])) for name, values in seconds.items()}
  return medians | {"all_s": sum(medians.values()), "columns": program.sizes["columns"]}


def measure_sage_training(args: argparse.Namespace) -> dict[str, float]:
  """Median seconds of a training step of GraphSAGE on programs of the sizes of `training`."""
  job = job_lib.Job.of(layout_config.get_config("xla-random,full"))
  model, optimizer = job.ranker.family.network, optax.adamw(1e-3)
  batch = workloads.layout_batch(
      graphs=8, nodes=6_000, config_nodes=250, configs=16, hops=model.hops)
  batch = jax.device_put(batch)
  params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
  seconds, _ = step_seconds(make_step(model, optimizer), (params, optimizer.init(params)), batch,
                            repeats=args.repeats)
  return {"step_s": seconds}


def ranker_of(variant: str, programs):
  """The ranker of a variant of `configs/layout.py` with its initial parameters."""
  job = job_lib.Job.of(layout_config.get_config(f"xla-random,{variant}"))
  job.fit(programs[:1])
  ranker = job.ranker
  with tempfile.TemporaryDirectory() as folder:
    stage, _ = training.first_stage(job, job.prepare(programs[:1]), Path(folder))
  ranker.params = stage.state.params
  return ranker


def measure_scores(variant: str, programs) -> dict[str, float]:
  """Seconds of a first scoring, with compilation, and of a second one; its configurations/s."""
  ranker, seconds = ranker_of(variant, programs), []
  for _ in range(2):
    started = time.perf_counter()
    ranker.scores(programs)
    seconds.append(time.perf_counter() - started)
  configs = sum(len(program.configs) for program in programs)
  return {"first_s": seconds[0], "second_s": seconds[1], "configs": configs,
          "configs_per_s": configs / seconds[1]}


def one_program(configs: int):
  """A program of the size of `ranking`, in a list."""
  return [workloads.program(
      np.random.default_rng(0), nodes=10_000, config_nodes=500, configs=configs)]


def split_programs():
  """Programs of the published sizes, with a twentieth of their nodes configurable."""
  return [workloads.program(np.random.default_rng(i), nodes=nodes, configs=configs,
                            config_nodes=max(nodes // 20, 8))
          for i, (nodes, configs) in enumerate(_SPLIT)]


def measure_pairs(args: argparse.Namespace) -> dict[str, float]:
  """Median seconds to find the pairs of a program of the largest released size."""
  graph = workloads.program(
      np.random.default_rng(0), nodes=_LARGEST, config_nodes=2_500, configs=10)
  find = lambda: node_pairs.find_pairs(graph, hops=args.hops).via
  seconds = timing.medians({"find": find}, repeats=args.repeats)
  return {"find_s": seconds["find"], "pairs": len(find())}


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
  """Figures of one case, with the peak memory of this process."""
  figures = {
      "training": measure_training, "sage_training": measure_sage_training,
      "ranking": measure_ranking, "pairs": measure_pairs,
      "sage_ranking": lambda args: measure_scores("full", one_program(1_000)),
      "few": lambda args: measure_scores("tables", one_program(1_000)),
      "many": lambda args: measure_scores("tables", one_program(100_000)),
      "split": lambda args: measure_scores("tables", split_programs())}
  return figures[case](args) | {"peak_mib": log.peak_memory()[1] / 2**20}


def main() -> None:
  parser = timing.parser(__doc__, repeats=5)
  parser.add_argument("--only", choices=_CASES, help="run one case, in this process")
  parser.add_argument("--rounds", type=int, default=4, help="rounds of message passing")
  parser.add_argument("--width", type=int, default=32, help="width of node states")
  parser.add_argument("--hops", type=int, default=6, help="most edges between two nodes of a pair")
  args = parser.parse_args()
  if args.only:
    timing.report(measure(args.only, args), args.out)
    return
  options = [f"--{name}={getattr(args, name)}" for name in ("rounds", "width", "hops", "repeats")]
  results = {case: timing.in_subprocess("tables.py", "--only", case, *options) for case in _CASES}
  timing.write(results | {"machine": timing.machine()}, args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
