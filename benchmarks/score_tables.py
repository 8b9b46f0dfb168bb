"""Speed and memory of score tables: training steps and ranking of very many configurations.

    python -m benchmarks.tables --out tables.json

training       a step on 8 programs of 6,000 nodes, 250 of them configurable, with 256
               configurations each
sage_training  a step of GraphSAGE on programs of these sizes with 16 configurations each
few, many      ranking of 1,000 and of 100,000 configurations of a program of 10,000 nodes, 500
               of them configurable
sage_ranking   1,000 configurations of such a program by GraphSAGE
split          all configurations of programs with the sizes of layout:xla:default
pairs          finding the pairs of configurable nodes in a program of 43,615 nodes, the size
               of the largest released one

GraphSAGE is `xla-random,full`. Each case runs in a process of its own, whose peak memory is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from pathlib import Path
import tempfile
import time

import jax
import numpy as np
import optax

from benchmarks import timing, workloads
from tpugraphs_jax import losses
from tpugraphs_jax.data import batching, plan
from tpugraphs_jax.infra import machine
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.rankers.tables import batches, node_pairs, terms
from tpugraphs_jax.rankers.tables.network import ScoreTables
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log, training
from tpugraphs_jax.train.loading import data_of, fit

_LARGEST = 43_615  # nodes of the largest released graph
# Nodes and configurations of the training programs of layout:xla:default, as published.
_SPLIT = (
  (372, 47712),
  (490, 100040),
  (650, 100040),
  (1111, 34200),
  (1111, 48288),
  (2774, 1159),
  (4185, 100040),
  (4748, 15656),
  (5162, 9176),
  (5162, 17632),
  (5279, 9912),
  (5345, 11400),
  (5358, 7584),
  (5605, 8552),
  (5605, 10528),
  (5670, 6797),
  (5673, 8632),
  (5673, 12912),
  (5689, 8560),
  (5809, 9224),
  (6136, 12984),
  (6656, 5304),
  (7324, 25240),
  (7324, 27024),
  (7768, 6344),
  (8636, 12048),
  (8836, 7592),
  (8836, 13320),
  (8847, 5408),
  (9257, 11104),
  (10092, 7688),
  (10449, 5688),
  (12062, 40024),
  (12069, 10016),
  (12565, 5820),
  (13342, 4999),
  (13502, 5192),
  (13867, 6558),
  (13867, 6623),
  (14680, 11960),
  (15022, 6488),
  (15022, 7576),
  (15748, 4692),
  (15809, 10776),
  (19348, 5471),
  (19662, 6288),
  (19662, 7768),
  (20665, 22496),
  (21126, 18528),
  (21196, 18992),
  (21335, 19224),
  (21338, 19096),
  (22385, 18200),
  (24790, 6228),
  (24793, 13216),
  (25544, 11560),
  (26234, 15256),
  (26906, 12920),
  (39452, 9816),
  (40332, 11152),
  (43615, 1960),
)
_LOSSES = losses.parse_losses("ListMLELoss:1")
_ROUNDS, _WIDTH, _HOPS = 4, 32, 6  # of score tables


def table_batch():
  """Eight programs with their unary and pair terms, and all of their 256 configurations."""
  programs = []
  for seed in range(8):
    graph = workloads.program(
      np.random.default_rng(seed), nodes=6_000, config_nodes=250, configs=256
    )
    programs.append(batches.prepare(graph, graph.node_feat, terms.terms_of(graph, hops=_HOPS)))
  slates = [
    batching.Slate(program, np.arange(256), np.arange(256, dtype=np.float32))
    for program in programs
  ]
  (budget,) = plan.choose_budgets([batching.total_sizes(programs)])
  return batches.assemble(slates, budget, graphs=len(slates), configs=256)


def measure_step(model, batch, repeats: int) -> dict[str, float]:
  """Median seconds of a training step."""
  optimizer, batch = optax.adamw(1e-3), jax.device_put(batch)

  def loss(params, batch):
    predicted = model.apply({"params": params}, batch, train=True)
    return losses.combine(
      _LOSSES, *losses.loss_sums(_LOSSES, predicted, batch.target, where=batch.config_mask)
    )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, moments, batch):
    grads = jax.grad(loss)(params, batch)
    updates, moments = optimizer.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments

  params = jax.jit(model.init)(jax.random.key(0), batch)["params"]
  state = params, optimizer.init(params)

  def train():
    nonlocal state
    state = step(*state, batch)
    return state

  return {"step_s": timing.medians({"step": train}, repeats=repeats)["step"]}


def measure_sage_step(repeats: int) -> dict[str, float]:
  """Median seconds of a training step of GraphSAGE on programs of the sizes of `table_batch`."""
  model = Ranker(configs.load("layout.py:xla-random,full")).family.network
  batch = workloads.layout_batch(
    graphs=8, nodes=6_000, config_nodes=250, configs=16, hops=model.hops
  )
  return measure_step(model, batch, repeats)


def measure_scores(variant: str, programs) -> dict[str, float]:
  """Seconds of a first scoring, with compilation, and of a second one; its configurations/s."""
  ranker, seconds = Ranker(configs.load(f"layout.py:xla-random,{variant}")), []
  (data,) = data_of(ranker.config)
  fit(ranker, [data], programs[:1])
  graphs = [ranker.prepare(program) for program in programs[:1]]
  with tempfile.TemporaryDirectory() as folder:
    phase = ranker.family.first_phase(graphs, Path(folder))
    state, *_ = training.begin(phase, training.plan_batches(phase, data.targets))
  ranker.params = state.params
  for _ in range(2):
    started = time.perf_counter()
    ranker.scores(programs)
    seconds.append(time.perf_counter() - started)
  count = sum(len(program.configs) for program in programs)
  return {
    "first_s": seconds[0],
    "second_s": seconds[1],
    "configs": count,
    "configs_per_s": count / seconds[1],
  }


def one_program(configs: int):
  """A program of 10,000 nodes, in a list."""
  return [
    workloads.program(np.random.default_rng(0), nodes=10_000, config_nodes=500, configs=configs)
  ]


def split_programs():
  """Programs of the published sizes, with a twentieth of their nodes configurable."""
  return [
    workloads.program(
      np.random.default_rng(i), nodes=nodes, configs=configs, config_nodes=max(nodes // 20, 8)
    )
    for i, (nodes, configs) in enumerate(_SPLIT)
  ]


def measure_pairs(repeats: int) -> dict[str, float]:
  """Median seconds to find the pairs of a program of the largest released size."""
  graph = workloads.program(
    np.random.default_rng(0), nodes=_LARGEST, config_nodes=2_500, configs=10
  )
  find = lambda: node_pairs.find_pairs(graph, hops=_HOPS).via
  return {"find_s": timing.medians({"find": find}, repeats=repeats)["find"]}


CASES: dict[str, Callable[[int], dict[str, float]]] = {
  "training": lambda repeats: measure_step(
    ScoreTables(num_gnns=_ROUNDS, hidden_dim=_WIDTH), table_batch(), repeats
  ),
  "sage_training": measure_sage_step,
  "sage_ranking": lambda repeats: measure_scores("full", one_program(1_000)),
  "split": lambda repeats: measure_scores("tables", split_programs()),
  "few": lambda repeats: measure_scores("tables", one_program(1_000)),
  "many": lambda repeats: measure_scores("tables", one_program(100_000)),
  "pairs": measure_pairs,
}


def main() -> None:
  parser = timing.parser(__doc__, repeats=5)
  parser.add_argument("--only", choices=CASES, help="run one case, in this process")
  args = parser.parse_args()
  if args.only:
    figures = CASES[args.only](args.repeats)
    timing.report(figures | {"peak_mib": log.peak_memory()[1] / 2**20}, args.out)
    return
  options = ["--repeats", str(args.repeats)]
  results = {case: timing.in_subprocess("score_tables", "--only", case, *options) for case in CASES}
  timing.write(results, args.out)


if __name__ == "__main__":
  machine.keep_freed()
  main()
