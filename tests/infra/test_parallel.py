"""Several devices and processes compute what one device computes."""

import contextlib
import os
import re
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import commands, comparing, parallel_worker, toy
from tests.support.run_folders import metrics
from tpugraphs_jax.infra import console, machine, parallel


def test_unreplicate_undoes_replicate_bit_for_bit():
  tree = {
    "scalar": np.float32(0.1),
    "matrix": np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32),
    "mask": np.array([True, False]),
    "empty": np.zeros((0, 3), np.int32),
  }
  replicated = parallel.replicate(tree)
  assert jax.tree.map(np.shape, replicated)["matrix"] == (4, 3, 2)
  comparing.assert_same_trees(parallel.unreplicate(replicated), tree)


def test_a_mapped_function_runs_beside_a_mesh_of_the_caller():
  double = parallel.pmap(lambda x: 2 * x, local=True)
  with jax.set_mesh(jax.make_mesh((2,), ("x",))):
    np.testing.assert_array_equal(double(np.ones((4, 3))), np.full((4, 3), 2.0))
  assert parallel.memory_of(double, np.ones((4, 3), np.float32)) > 0


def test_unreplicated_arrays_outlive_donation():
  state = parallel.replicate({"x": np.arange(1000.0, dtype=np.float32)})
  kept = parallel.unreplicate(state)
  double = parallel.pmap(lambda s: jax.tree.map(lambda x: 2 * x, s), donate_argnums=0)
  for _ in range(3):
    state = double(state)
  np.testing.assert_array_equal(kept["x"], np.arange(1000.0))
  np.testing.assert_array_equal(parallel.unreplicate(state)["x"], 8 * np.arange(1000.0))


def test_stack_for_devices_refuses_another_number_of_devices():
  with pytest.raises(ValueError, match="per-device"):
    parallel.stack_for_devices([{"x": np.zeros(1)}] * 3)


def test_other_processes_neither_write_nor_speak(monkeypatch, capsys):
  write = parallel.primary_only(lambda text, *, end: text + end)
  assert write("a", end="b") == "ab"
  monkeypatch.setattr(machine, "is_primary", lambda: False)
  assert write("a", end="b") is None
  console.say("x")
  console.note("x")
  assert capsys.readouterr() == ("", "")


def test_a_forked_process_ranks_or_says_at_once_why_it_cannot(tmp_path):
  """Threads of jax are not forked, and their work would be waited for."""
  (graph,) = (commands.ROOT / "data/own/npz").rglob("kept_out/test/*graph_attention.npz")
  code = (
    "import multiprocessing, tpugraphs_jax\n"
    "def rank():\n"
    f"  graph = tpugraphs_jax.read_layout({str(graph)!r})\n"
    "  try:\n"
    "    print('first', tpugraphs_jax.rank('layout-v3-estimate', graph)[0][0], flush=True)\n"
    "  except RuntimeError as error:\n"
    "    print(error, flush=True)\n"
    "def rank_in_fork():\n"
    "  child = multiprocessing.get_context('fork').Process(target=rank)\n"
    "  child.start()\n"
    "  child.join(60)\n"
    "  child.kill()\n"
    "rank_in_fork()\n"
    "rank()\n"
    "rank_in_fork()\n"
  )
  ended = commands.python("-W", "ignore", "-c", code, cwd=tmp_path)
  before, here, after = ended.stdout.splitlines()
  assert before == here == "first 0", ended.stderr
  assert "'spawn'" in after


@pytest.mark.parametrize("batch_size", [0, -4, 3, 10])
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(batch_size):
  with pytest.raises(ValueError, match=f"batch.graphs is {batch_size}, .* of the 4 devices"):
    parallel.per_device(batch_size, field="batch.graphs")
  assert parallel.per_device(12) == 3


@pytest.mark.parametrize(
  "given, named",
  [
    ({"num_processes": 2}, "--coordinator_address, --process_id"),
    ({"coordinator_address": "localhost:1"}, "--num_processes, --process_id"),
    ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, "--process_id is 2"),
  ],
)
def test_incomplete_or_impossible_process_flags_are_refused(given, named):
  with pytest.raises(ValueError, match=named):
    parallel.initialize(**given)


def losses_of_one_device():
  """Losses of the toy run on one device, which gets every batch whole."""
  step = parallel.pmap(toy.device_step)
  state = jax.tree.map(lambda x: jnp.asarray(x)[None], toy.make_state())
  losses = []
  for index in range(toy.STEPS):
    batch = toy.make_batch(index)
    flat = {"x": batch["x"].reshape(1, -1), "y": batch["y"].reshape(1, -1)}
    state, metrics = step(state, flat | {"index": batch["index"][:1]})
    losses.append(float(metrics["loss"][0]))
  return losses


def run_processes(what, workdir, *, culprit=1, processes=2):
  """Starts all processes; returns their exit codes and outputs."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  culprit = min(culprit, processes - 1)
  outputs = [workdir / f"output_{place}" for place in range(processes)]
  started = [
    commands.server().Process(
      target=parallel_worker.main, args=(out, port, place, what, workdir, culprit, processes)
    )
    for place, out in enumerate(outputs)
  ]
  for process in started:
    process.start()
  try:
    for place in sorted(range(processes), key=lambda place: place == culprit):
      if what == "freeze" and place == culprit:  # only SIGKILL ends a stopped process
        started[place].kill()
      started[place].join(timeout=300)
  finally:
    for process in started:
      process.kill()
      process.join()
  return [process.exitcode for process in started], [out.read_text() for out in outputs]


def read_losses(workdir):
  rows = metrics(workdir)
  assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
  return [row["train/loss"] for row in rows]


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_several_processes_give_the_losses_of_one_device_also_when_stopped(tmp_path, before, after):
  codes, outputs = run_processes("stop", tmp_path, processes=before)
  assert codes == [143] * before, outputs
  (step,) = re.findall(r"saved step (\d+); go on with --resume", outputs[0])
  # A step that is evaluated gets its row only after the evaluation.
  assert 3 <= len(read_losses(tmp_path)) <= int(step) < toy.STEPS
  codes, outputs = run_processes("resume", tmp_path, processes=after)
  assert codes == [0] * after, outputs
  assert [f"resumed at step {step}" in output for output in outputs] == [True, False][:after]
  np.testing.assert_allclose(read_losses(tmp_path), losses_of_one_device(), rtol=1e-5)


@pytest.mark.parametrize("what, culprit", [("raise", 1), ("die", 0), ("freeze", 1), ("freeze", 0)])
def test_a_process_that_dies_or_stands_still_ends_the_other(tmp_path, what, culprit):
  started = time.monotonic()
  codes, outputs = run_processes(what, tmp_path, culprit=culprit)
  assert time.monotonic() - started < 90  # start and compilation, and 10 seconds of silence
  assert codes[1 - culprit] not in (0, None) and codes[culprit] != 0, outputs
  assert re.search(
    rf"Process .*process {culprit} on \S+ \(process id \d+\).*--resume", outputs[1 - culprit]
  )
  if what == "raise":
    assert f"error: process {culprit} of 2 stops (ValueError: a bad file)" in outputs[culprit]


_LEVEL, _PASSES, _EMITTERS = (
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
  "--xla_cpu_use_fusion_emitters=false",
)


@pytest.mark.parametrize(
  "flags, version, expected",
  [
    ("", (0, 10, 2), [_LEVEL, _PASSES, _EMITTERS]),
    ("--xla_a=1", (0, 7, 2), ["--xla_a=1", _LEVEL, _PASSES, _EMITTERS]),
    ("--xla_a=1", (0, 11, 0), ["--xla_a=1", _LEVEL, _PASSES]),  # without the last flag
    (
      "--xla_backend_optimization_level=2",
      (0, 10, 2),
      ["--xla_backend_optimization_level=2", _PASSES, _EMITTERS],
    ),
  ],
)
def test_quick_compilation_keeps_the_flags_of_the_user(flags, version, expected, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", flags)
  monkeypatch.setattr(parallel.jaxlib.version, "__version_info__", version)
  parallel.compile_quickly()
  assert os.environ["XLA_FLAGS"].split() == expected


_ORDERED, _NATIVE = (
  "--xla_gpu_deterministic_ops=true",
  "--xla_backend_extra_options=--nvptx-allow-ftz-atomics",
)


@pytest.mark.parametrize(
  "flags, expected",
  [
    ("", [_ORDERED]),
    ("--xla_a=1", ["--xla_a=1", _ORDERED]),
    ("--xla_gpu_deterministic_ops=false", ["--xla_gpu_deterministic_ops=false"]),
  ],
)
def test_deterministic_runs_ask_for_sums_in_one_order(flags, expected, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", flags)
  parallel.compute_deterministically()
  assert os.environ["XLA_FLAGS"].split() == expected


@pytest.mark.parametrize(
  "backend, flags, is_refused",
  [("gpu", "", True), ("gpu", _ORDERED, False), ("cpu", "", False), ("tpu", "", False)],
)
def test_a_gpu_without_the_flag_cannot_be_deterministic(backend, flags, is_refused, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", flags)
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  with (
    pytest.raises(ValueError, match="deterministic") if is_refused else (contextlib.nullcontext())
  ):
    parallel.check_deterministic()


@pytest.mark.parametrize(
  "backend, version, flags, warns",
  [
    ("gpu", (0, 10, 2), "", True),
    ("gpu", (0, 11, 0), "", True),
    ("gpu", (0, 10, 1), "", False),
    ("gpu", (0, 11, 2), "", False),
    ("gpu", (0, 10, 2), _NATIVE, False),
    ("gpu", (0, 10, 2), _ORDERED, False),
    ("cpu", (0, 10, 2), "", False),
  ],
)
def test_a_run_warns_of_a_jaxlib_with_slow_sums_on_gpus(
  backend, version, flags, warns, monkeypatch, caplog
):
  monkeypatch.setenv("XLA_FLAGS", flags)
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  monkeypatch.setattr(parallel.jaxlib.version, "__version_info__", version)
  with caplog.at_level("WARNING"):
    parallel.warn_of_slow_sums()
  assert ("jaxlib" in caplog.text) == warns


CACHED = """
import sys
import jax, jax.numpy as jnp
from tpugraphs_jax.infra import parallel
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
parallel.use_compilation_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(1) if name.endswith("cache_hits") else None)
parallel.pmap(lambda x: jnp.sin(x) * 3)(jnp.ones((1, 5))).block_until_ready()
print("hits", len(hits))
"""


def test_the_second_run_takes_its_programs_from_the_cache(tmp_path):
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  environment.pop("JAX_COMPILATION_CACHE_DIR", None)
  first, second = (
    commands.python("-W", "error", "-c", CACHED, tmp_path / "cache", env=environment)
    for _ in range(2)
  )
  assert first.stdout == "hits 0\n", first.stderr
  assert second.returncode == 0 and second.stdout != "hits 0\n", second.stderr
  assert second.stderr == ""


def test_running_out_of_device_memory_is_one_line_with_advice():
  with pytest.raises(ValueError) as error, parallel.explaining_memory("take less"):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nallocator report")
  assert str(error.value) == "RESOURCE_EXHAUSTED: Out of memory; take less"
  with pytest.raises(jax.errors.JaxRuntimeError), parallel.explaining_memory("take less"):
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_a_file_of_flags_keeps_its_flags(monkeypatch, tmp_path):
  (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=2\n")
  monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
  parallel.compute_deterministically()
  assert os.environ["XLA_FLAGS"].split() == [
    "--xla_a=1",
    "--xla_b=2",
    "--xla_gpu_deterministic_ops=true",
  ]
  (tmp_path / "flags").write_text("--xla_gpu_deterministic_ops=false")
  monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
  parallel.compute_deterministically()
  assert os.environ["XLA_FLAGS"] == "--xla_gpu_deterministic_ops=false"
  monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "missing"))
  with pytest.raises(ValueError, match="name of a file of flags"):
    parallel.compute_deterministically()
