"""Score tables on a synthetic layout collection: tau by step, and what they propose.

    python -m tpugraphs_jax.data.synthetic --out DIR --scale medium --collections layout:xla:random
    python benchmarks/tables_quality.py --data_root DIR/npz --model '{"num_gnns": 4}'

Trains with ListMLE on whole slates. At the end the ten configurations with the lowest
predicted cost of every validation program are set beside the best of the file and the
optimum, in runtimes without noise, which the generator can tell for any choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import functools
import json
from pathlib import Path
import sys
import time

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
from tpugraphs_jax import losses as losses_lib
from tpugraphs_jax import metrics
from tpugraphs_jax.data import batching, buckets, features, npz, synthetic, table_batching, terms
from tpugraphs_jax.data.synthetic import layout_programs, layout_search, scales
from tpugraphs_jax.data.synthetic.layout_cost import layout_cost
from tpugraphs_jax.models.tables import ScoreTables
from tpugraphs_jax.predict import search
import timing

_EVALUATED = 1_000  # configurations of a program, at most
_LOSSES = losses_lib.parse_losses("ListMLELoss:1")


def load(args: argparse.Namespace) -> dict[str, list[table_batching.PreparedTables]]:
  """The programs of both labelled splits, features fitted on the training split."""
  graphs = {split: [npz.read_layout(file) for file in npz.split_files(
      args.data_root, args.collection, split)] for split in ("train", "valid")}
  kinds = features.parse_kinds("signed_log1p", features.NODE_GROUPS)
  transform = features.fit([graph.node_feat for graph in graphs["train"]], kinds)
  return {split: [table_batching.prepare(
      graph, transform(graph.node_feat), terms.terms_of(graph, hops=args.hops),
      tiling=args.tiling) for graph in some] for split, some in graphs.items()}


def slates(programs: Sequence, configs: int, rng: np.random.Generator) -> list[batching.Slate]:
  """Random configurations of each program, their runtimes relative to the fastest."""
  made = []
  for program in programs:
    ids = rng.permutation(len(program.configs))[:configs]
    runtime = program.configs.runtime_ns[ids]
    made.append(batching.Slate(program, ids, (runtime / runtime.min()).astype(np.float32)))
  return made


def batches(programs: Sequence, args: argparse.Namespace) -> Iterator:
  """The training batches: programs in random order, epoch after epoch."""
  rng = np.random.default_rng(args.seed)
  epochs = -(-args.steps * args.graphs // len(programs))
  order = np.concatenate([rng.permutation(len(programs)) for _ in range(epochs)])
  plan = [[programs[i] for i in row]
          for row in order[: args.steps * args.graphs].reshape(args.steps, args.graphs)]
  budgets = buckets.choose_budgets([batching.total_sizes(row) for row in plan], max_budgets=2)
  for row in plan:
    budget = budgets[buckets.smallest_fit([batching.total_sizes(row)], budgets)]
    yield table_batching.assemble_tables(
        slates(row, args.configs, rng), budget, graphs=args.graphs, configs=args.configs)


def make_step(model: ScoreTables, args: argparse.Namespace):
  """The optimiser and the compiled step `(params, moments, batch, key) -> the first two`."""
  schedule = optax.warmup_cosine_decay_schedule(
      0, args.learning_rate, args.steps // 20, args.steps)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(
      schedule, weight_decay=args.weight_decay,
      mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)))

  def loss(params, batch, key):
    found = model.apply({"params": params}, batch, train=True, rngs={"dropout": key})
    return losses_lib.combine(_LOSSES, *losses_lib.loss_sums(
        _LOSSES, found, batch.target, where=batch.config_mask))

  @jax.jit
  def step(params, moments, batch, key):
    updates, moments = optimizer.update(jax.grad(loss)(params, batch, key), moments, params)
    return optax.apply_updates(params, updates), moments

  return optimizer, step


def table_costs(model, params, program, budget) -> tuple[np.ndarray, np.ndarray]:
  """Costs `[B, R]` and `[Q, R, R]` of one program, Q = 0 without pairs."""
  batch = table_batching.assemble_tables(
      slates([program], 1, np.random.default_rng(0)), budget, graphs=1, configs=1)
  unary, pair = jax.device_get(_tables(model)({"params": params}, batch))
  width, groups, columns = (
      program.terms.choices, program.sizes["groups"], program.sizes["columns"])
  if pair is None:
    return unary[:groups, :width].sum(axis=-1), np.zeros((0, width, width))
  return unary[:groups, :width].sum(axis=-1), pair[:columns, :width, :width].sum(axis=-1)


@functools.cache
def _tables(model: ScoreTables):
  return jax.jit(functools.partial(model.apply, method="tables"))


def taus(programs: Sequence, costs: Sequence) -> np.ndarray:
  """Kendall's tau of each program, on a fixed sample of its configurations."""
  found = []
  for program, tables in zip(programs, costs):
    ids = np.random.default_rng(1).permutation(len(program.configs))[:_EVALUATED]
    score = program.terms.total(program.configs.group_row[ids], *tables)
    found.append(metrics.kendall_tau(score, program.configs.runtime_ns[ids]))
  return np.array(found)


def proposals(program, tables, args: argparse.Namespace) -> dict[str, float]:
  """Slowdowns over the optimum of the best of ten proposals and of measured ones.

  `proposed` searches freely, `proposed_near` from configuration 0, the generator's own
  choice; `own` is this choice and `measured` the best in the file.
  """
  costs = search.of_tables(program.terms.counts, program.terms.columns, *tables)
  start = program.terms.encode(program.configs.group_row[[0]])[:, 0].astype(int)
  found, near = search.propose(*costs, 10), search.propose_near(*costs, start, 10)
  cost, groups = _truth(program.name, args)

  def runtime(choice: np.ndarray) -> float:
    """The least noise-free runtime of choices `[n, groups]`."""
    rows = program.configs.rows[program.terms.decode(choice.T)]  # [n, B, 18]
    same = (groups.rows[groups.options] == rows[:, :, None]).all(axis=-1)  # [n, B, options]
    return cost(layout_search.output_bits(same.argmax(axis=-1))).min()

  pairs = {(int(g), int(h)): np.diag([0.0, cost.pairs[g, h]])
           for g, h in np.argwhere(cost.pairs)}
  best = search.propose([np.array([0, value]) for value in cost.linear], pairs, 1)
  optimum = cost.base + best.cost[0]
  measured = synthetic.read_ceiling(
      args.data_root, args.collection, "valid", program.name).runtime_ns.min()
  return {"proposed": runtime(found.choice) / optimum - 1,
          "proposed_near": runtime(near.choice) / optimum - 1,
          "own": runtime(start[None]) / optimum - 1, "measured": measured / optimum - 1,
          "optimum_is_exact": best.is_exact, "search_is_exact": found.is_exact}


def _truth(name: str, args: argparse.Namespace):
  """The cost function and groups that a validation program was generated with."""
  spec, = (spec for spec in scales.file_specs(args.scale, 0, args.collection)
           if spec.split == "valid" and spec.name() == name)
  size, rng = scales.layout_size(spec), spec.rng("graph")
  build = (layout_programs.image_program if ":xla:" in args.collection
           else layout_programs.text_program)
  program = build(rng, **size.program)
  groups = layout_search.find_groups(program, rng)
  return layout_cost(program, groups.by_node(), steps=size.steps), groups


def main() -> None:
  parser = timing.parser(__doc__)
  parser.add_argument("--data_root", required=True)
  parser.add_argument("--collection", default="layout:xla:random")
  parser.add_argument("--scale", default="medium", help="of the data, which have seed 0")
  parser.add_argument("--model", type=json.loads, default={}, help="options, as JSON")
  for name, value in dict(steps=1000, graphs=4, configs=256, seed=0, hops=6, eval_every=250,
                          learning_rate=3e-3, weight_decay=1e-2).items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
  parser.add_argument("--no_tiling", dest="tiling", action="store_false")
  args = parser.parse_args()
  programs, model = load(args), ScoreTables(**args.model)
  everything = programs["train"] + programs["valid"]
  one, = buckets.choose_budgets([p.sizes for p in everything], max_budgets=1)
  optimizer, step = make_step(model, args)
  params, seconds, history = None, 0.0, []
  for number, batch in enumerate(batches(programs["train"], args), 1):
    if params is None:
      params = jax.jit(model.init)(jax.random.key(args.seed), batch)["params"]
      moments = optimizer.init(params)
    started = time.process_time()
    params, moments = jax.block_until_ready(
        step(params, moments, batch, jax.random.key(number)))
    seconds += time.process_time() - started if number > 1 else 0
    if number % args.eval_every == 0 or number == args.steps:
      costs = [table_costs(model, params, p, one) for p in programs["valid"]]
      tau = taus(programs["valid"], costs)
      history.append({"step": number, "cpu_s": seconds, "tau": float(tau.mean())})
      print(history[-1], np.round(tau, 3), flush=True)
  found = {p.name: proposals(p, c, args) for p, c in zip(programs["valid"], costs)}
  for name, row in found.items():
    print(name, row)
  timing.write({"history": history, "proposals": found, "machine": timing.machine()}, args.out)


if __name__ == "__main__":
  main()
