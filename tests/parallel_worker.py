"""One process of a two-process run; started by test_parallel.py, not by pytest.

Arguments: port, process id, what to do, working folder.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")

import toy  # noqa: E402

from tpugraphs_jax.train import loop  # noqa: E402
from tpugraphs_jax.train import parallel  # noqa: E402


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
    "stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def main(port, process_id, what, workdir):
  parallel.initialize(
      f"localhost:{port}", 2, int(process_id), heartbeat_timeout_seconds=3
  )
  is_second = parallel.process_index() == 1
  gathered = parallel.gather_objects({"id": int(process_id), "pad": "x" * int(process_id)})
  assert gathered == [{"id": 0, "pad": ""}, {"id": 1, "pad": "x"}]
  assert parallel.from_primary(0.1 if not is_second else None) == 0.1
  source = np.arange(700, dtype=np.int64).reshape(100, 7) << 40
  target = np.zeros_like(source)
  parallel.copy_from_primary(None if is_second else source, target, block_bytes=1000)
  np.testing.assert_array_equal(target, source)
  assert parallel.any_process(is_second) and not parallel.any_process(False)
  assert parallel.per_device(8) == 2
  # Only process 0's folder is ever used.
  folder = Path(workdir) if not is_second else Path(workdir) / "of-the-second"
  loop.train(
      toy.make_state(),
      train_step=toy.TRAIN_STEP,
      batches=Batches(EVENTS[what] if is_second else EVENTS["train"]),
      evaluate=toy.evaluate,
      workdir=folder,
      total_epochs=toy.EPOCHS,
      steps_per_epoch=toy.STEPS_PER_EPOCH,
      log_every_steps=1,
      resume=what == "resume",
  )
  assert not (Path(workdir) / "of-the-second").exists()


if __name__ == "__main__":
  main(*sys.argv[1:])
