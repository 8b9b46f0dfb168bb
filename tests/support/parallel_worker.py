"""One process of a run with four devices; test_parallel.py starts it."""

import os
from pathlib import Path
import signal

import jax
import numpy as np

from tests.support import commands, random_graphs, toy
from tpugraphs_jax.data import batching
from tpugraphs_jax.infra import machine, parallel
from tpugraphs_jax.rankers import base, scorer


class Batches:
  """This process' half of the batches, with an event before one of them."""

  def __init__(self, event):
    self.next_index, self.event = 0, event

  def __next__(self):
    self.next_index += 1
    if self.next_index == 4:
      self.event()
    devices = parallel.local_device_count()
    first = parallel.process_index() * devices
    batch = toy.make_batch(self.next_index - 1)
    return {k: v[first : first + devices] for k, v in batch.items()}

  def get_state(self):
    return {"next_index": self.next_index}

  def set_state(self, state):
    self.next_index = state["next_index"]


def fail():
  raise ValueError("a bad file")


EVENTS = {
  "train": lambda: None,
  "resume": lambda: None,
  "raise": fail,
  "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
  "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
  "stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def check_scores():
  """Scores are right where one of two processes has more groups of batches than the other."""
  rng = np.random.default_rng(0)
  raw = [
    random_graphs.tile_graph(rng, nodes=nodes, edges=2 * nodes, configs=5)
    for nodes in (5, 9, 40, 17, 3)
  ]
  graphs = [batching.prepare(graph, graph.node_feat) for graph in raw]
  model = base.create_network("tile", "EarlyJoinSAGE", op_embed_dim=4, hidden_dim=8, num_gnns=1)
  budget = random_graphs.common_budget([graph.sizes for graph in graphs])
  alone = [
    random_graphs.assemble(
      [batching.Slate(graph, np.arange(5), np.zeros(5, np.float32))], budget, graphs=1, configs=5
    )
    for graph in graphs
  ]
  params = jax.jit(model.init)(jax.random.key(0), alone[0])["params"]
  encoder = scorer.Encoder(scorer.network_step(model), random_graphs.assemble, graphs=1, configs=5)
  found = encoder(params, graphs, [np.arange(5)] * len(graphs))
  apply = jax.jit(lambda batch: model.apply({"params": params}, batch))
  for scores, batch in zip(found, alone, strict=True):
    np.testing.assert_allclose(scores, np.asarray(apply(batch))[0], rtol=1e-4, atol=1e-6)


def check_exchange():
  """Objects and arrays that two processes exchange arrive unchanged."""
  is_second = parallel.process_index() == 1
  gathered = parallel.gather_objects({"id": int(is_second), "pad": "x" * is_second})
  assert gathered == [{"id": 0, "pad": ""}, {"id": 1, "pad": "x"}]
  assert parallel.from_primary(0.1 if not is_second else None) == 0.1
  source = np.arange(700, dtype=np.int64).reshape(100, 7) << 40
  target = np.zeros_like(source)
  parallel.copy_from_primary(lambda: source, target, block_bytes=1000)
  np.testing.assert_array_equal(target, source)
  check_scores()
  called = []
  write = parallel.primary_only(lambda value: called.append(value) or "written")
  assert write(3) == (None if is_second else "written") and called == [3] * (not is_second)
  assert parallel.any_process(is_second) and not parallel.any_process(False)
  assert parallel.per_device(8) == 2


def main(
  out: Path, port: int, process_id: int, what: str, workdir: Path, culprit: int, processes: int
) -> None:
  """Takes part in a run.

  Args:
    out: file for the output.
    port: of process 0.
    process_id: number of this process.
    what: event, a key of `EVENTS`.
    workdir: working folder.
    culprit: number of the process to which the event happens.
    processes: number of processes.
  """
  commands.redirect(out, out)
  jax.config.update("jax_num_cpu_devices", 4 // processes)
  parallel.initialize(f"localhost:{port}", processes, process_id, heartbeat_timeout_seconds=10)
  if processes == 2:
    check_exchange()
  # Only process 0's folder is ever used.
  folder = workdir if machine.is_primary() else workdir / "of-the-second"
  batches = Batches(EVENTS[what if process_id == culprit else "train"])
  toy.train(folder, batches=batches, log_every_steps=1, resume=what == "resume")
  assert not (workdir / "of-the-second").exists()
