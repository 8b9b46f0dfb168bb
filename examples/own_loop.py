"""A network and a training loop of your own, on graphs and batches of tpugraphs_jax.

    python examples/own_loop.py

Trains on tiny synthetic programs, which it makes in out/own_loop, and prints Kendall's tau of the
validation programs before and after. docs/own_loop.md explains the lines.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from tpugraphs_jax import losses, metrics, synthetic
from tpugraphs_jax.data import batching, npz, plan

COLLECTION, GRAPHS, CONFIGS = "layout:xla:random", 4, 8  # of a step


class Network(nn.Module):
  """A plain graph network; scores `[G, C]`, larger = slower."""

  @nn.compact
  def __call__(self, batch):
    graph, nodes = batch.graph, len(batch.graph.nodes["opcode"])
    opcode = nn.Embed(128, 16)(graph.nodes["opcode"])
    static = nn.Dense(32)(jnp.concatenate([graph.nodes["feat"], opcode], axis=-1))  # [N, 32]
    orders = jax.nn.one_hot(jnp.asarray(batch.rows, int) + 1, 7)  # [R, 18, 7]: -1 to 5
    row = nn.Dense(32)(orders.reshape(len(orders), -1))
    chosen = row.at[batch.row_id].get(mode="fill", fill_value=0)  # [K, C, 32]
    x = jnp.repeat(static[:, None], chosen.shape[1], axis=1)  # [N, C, 32]
    x = x.at[batch.by_hop.nodes[0]].add(chosen, mode="drop")
    for _ in range(3):
      operands = jraph.segment_mean(x[graph.senders], graph.receivers, nodes)
      users = jraph.segment_mean(x[graph.receivers], graph.senders, nodes)
      x += nn.gelu(nn.Dense(32)(jnp.concatenate([x, operands, users], axis=-1)))
    of = jnp.repeat(jnp.arange(len(graph.n_node)), graph.n_node, total_repeat_length=nodes)
    readout = jraph.segment_sum(x, of, len(graph.n_node))[:-1] / 10  # the last graph is padding
    return nn.Dense(1)(nn.gelu(nn.Dense(32)(readout)))[..., 0]


def read(root, split):
  graphs = [npz.read_layout(path) for path in npz.split_files(root, COLLECTION, split)]
  scale = lambda feat: np.sign(feat) * np.log1p(np.abs(feat))
  return [batching.prepare_program(graph, scale(graph.node_feat), hops=0) for graph in graphs]


def slate(graph, ids):
  runtime = graph.configs.labels[ids]
  return batching.Slate(graph, ids, np.float32(runtime / runtime.min()))


def batches(steps, graphs, configs):
  """Batches of one shape, so that a step is compiled once."""
  sizes = [batching.total_sizes([slate.graph for slate in slates]) for slates in steps]
  (budget,) = plan.choose_budgets(sizes, max_budgets=1)
  options = dict(graphs=graphs, configs=configs, transform=np.float32)
  return [batching.assemble_layout(slates, budget, **options) for slates in steps]


def main(root, steps=50):
  rng, train, valid = np.random.default_rng(0), read(root, "train"), read(root, "valid")
  draw = lambda graph: slate(graph, rng.permutation(len(graph.configs))[:CONFIGS])
  chosen = [rng.permutation(len(train))[:GRAPHS] for _ in range(steps)]
  training = batches([[draw(train[i]) for i in numbers] for numbers in chosen], GRAPHS, CONFIGS)
  every = [[slate(graph, np.arange(len(graph.configs)))] for graph in valid]
  judged = batches(every, 1, max(len(graph.configs) for graph in valid))

  network, optimizer = Network(), optax.adam(3e-3)
  params = jax.jit(network.init)(jax.random.key(0), training[0])
  state, score = optimizer.init(params), jax.jit(network.apply)

  def loss(params, batch):
    scores = network.apply(params, batch)
    total, count = losses.listmle(scores, jnp.asarray(batch.target), where=batch.config_mask)
    return total / count

  @jax.jit
  def step(params, state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value

  def tau(params):
    scores = [np.asarray(score(params, batch))[0] for batch in judged]
    runtimes = [graph.configs.labels for graph in valid]
    return np.mean([metrics.kendall_tau(s[: len(r)], r) for s, r in zip(scores, runtimes)])

  print(f"before training: tau {tau(params):.3f}, mean over {len(valid)} validation programs")
  for batch in training:
    params, state, value = step(params, state, batch)
  print(f"after {steps} steps: tau {tau(params):.3f}, loss of the last step {value:.3f}")


if __name__ == "__main__":
  main(synthetic.generate("out/own_loop", collections=[COLLECTION], progress=False))
