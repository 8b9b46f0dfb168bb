"""The compiler in its process: what it answers, and what is left when it ends."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from tests.support import hlo_modules, recorded
from tpugraphs_jax.hlo import buffers, calls, proto, topology, tpu
from tpugraphs_jax.tuning import compiler

_CALL = calls.Call(lambda x: x + 1, (1.0,), {})


@pytest.fixture
def child(monkeypatch, tmp_path):
  """Puts shell commands in the place of the compiler; its last argument is the folder.

  Functions are lowered for this machine.
  """
  monkeypatch.setattr(tpu, "lower", lambda call, target: call.lower(call.arrays))
  monkeypatch.setattr(topology, "devices", lambda target: jax.devices())

  def run(commands):
    path = tmp_path / "child.sh"
    path.write_text(f"#!/bin/sh\nfor folder; do :; done\n{commands}\n")
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))

  return run


def test_a_compiler_that_ends_its_process_says_what_it_said_last(child):
  child('read line; echo "Check failed: a == b" >&2; kill -SEGV $$')
  with compiler.Compiler() as made:
    folder = made._folder
    for _ in range(2):  # it is started again
      with pytest.raises(compiler.Ended, match=r"signal 11: Check failed: a == b"):
        made.compile(_CALL, "tpu:v6e")
  assert not folder.exists()


@pytest.mark.parametrize(
  "end, said", [("kill -SEGV $$", "signal 11"), ("exec sleep 60", "more than 2 s")]
)
def test_a_compiler_that_ends_says_which_kernels_it_was_at(child, tmp_path, end, said):
  nodes = [hlo_modules.instruction("sort", id) for id in (1, 2, 3, 4)]
  for node in nodes:
    node.metadata.op_name, node.metadata.source_file = f"jit(f)/sort_{node.id}", "/me/model.py"
    node.metadata.source_line = node.id
  module = hlo_modules.module(hlo_modules.computation(*nodes))
  module.entry_computation_id = 1
  module.schedule.sequences[1].instruction_ids.extend((2, 1, 3, 4))
  path = tmp_path / "module"
  path.write_bytes(module.SerializeToString())
  child(
    'read line; mkdir "$folder/modules"\n'
    f'cp {path} "$folder/modules/f.after_optimizations.hlo.pb"\n'
    f'touch "$folder/schedules/7-sort.2-01-final_bundles.txt"\n{end}'
  )
  with compiler.Compiler(timeout=2) as made, pytest.raises(compiler.Ended, match=said) as ended:
    made.compile(_CALL, "tpu:v6e")
  assert "sort_2 at model.py:2 (sort.2)" in str(ended.value)
  near = str(ended.value).partition("near it are ")[2]
  assert near == "sort_1 at model.py:1 (sort.1), sort_3 at model.py:3 (sort.3)"


def test_a_compiler_that_ends_before_its_kernels_says_no_kernel(child):
  child('read line; mkdir "$folder/modules"; kill -SEGV $$')
  with compiler.Compiler() as made, pytest.raises(compiler.Ended) as ended:
    made.compile(_CALL, "tpu:v6e")
  assert str(ended.value) == "it ended its process with signal 11"


def test_a_function_without_a_mesh_is_lowered_for_the_generation_of_a_topology(child):
  child("exit 0")  # takes the place of libtpu
  for target in ("tpu:v6e:2x2", "tpu:v6e"):
    lowered = compiler.lower(_CALL, target)
    assert lowered.target == "tpu:v6e" and len(lowered.devices) == 1


def test_a_compilation_that_takes_too_long_is_ended(child):
  child("exec sleep 60")
  with compiler.Compiler(timeout=0.3) as made:
    with pytest.raises(compiler.Ended, match="more than 0.3 s"):
      made.compile(_CALL, "tpu:v6e")
    folder = made._folder
  assert not folder.exists()


_MODULE = hlo_modules.module(hlo_modules.computation(hlo_modules.instruction()))
_MODULE.schedule.sequences[1].instruction_ids.append(1)


def test_a_compilation_that_is_ended_tells_the_module_that_it_has_scheduled(child, tmp_path):
  (tmp_path / "module").write_bytes(_MODULE.SerializeToString())
  place = "$folder/modules/module_0000.f.after_optimizations.hlo.pb"
  child(f'read line; mkdir "$folder/modules"; cp {tmp_path}/module "{place}"; exec sleep 60')
  with compiler.Compiler(memory_only=True) as made:
    with pytest.raises(compiler.Ended, match="memory was planned") as ended:
      made.compile(_CALL, "tpu:v6e")
    assert proto.parse_module(ended.value.module, where="test").name == "module"
  with compiler.Compiler(timeout=1.0) as made:
    with pytest.raises(compiler.Ended, match="more than 1 s") as ended:
      made.compile(_CALL, "tpu:v6e")
    assert ended.value.module
  child('read line; mkdir "$folder/modules"; exec sleep 60')
  with compiler.Compiler(timeout=0.3, memory_only=True) as made:
    with pytest.raises(compiler.Ended) as ended:
      made.compile(_CALL, "tpu:v6e")
  assert not ended.value.module


def test_schedules_do_not_fill_the_memory(child, monkeypatch):
  monkeypatch.setattr(compiler, "_LARGEST", 1000)
  child('read line; head -c 5000 /dev/zero > "$folder/schedules/1"; exec sleep 60')
  with compiler.Compiler() as made:
    with pytest.raises(compiler.Ended, match="schedules take more"):
      made.compile(_CALL, "tpu:v6e")
    folder = made._folder
  assert not folder.exists()


def test_a_refusal_is_an_error_of_jax_and_the_process_goes_on(child):
  child("""while read line; do echo '{"refusal": "RESOURCE_EXHAUSTED: too large"}'; done""")
  with compiler.Compiler() as made:
    process = made._process
    for _ in range(2):
      with pytest.raises(jax.errors.JaxRuntimeError, match="too large"):
        made.compile(_CALL, "tpu:v6e")
    assert made._process is process


def test_ctrl_c_ends_the_process_and_deletes_its_folder(child):
  child("read line; kill -INT $PPID; exec sleep 60")
  with pytest.raises(KeyboardInterrupt), compiler.Compiler() as made:
    folder, process = made._folder, made._process
    made.compile(_CALL, "tpu:v6e")
  assert process.poll() is not None and not folder.exists()


def test_the_process_ends_with_the_one_that_started_it_and_deletes_its_folder(tmp_path):
  """Also where that one was killed and could delete nothing."""
  folder = tmp_path / "folder"
  folder.mkdir()
  start = (
    "import os, subprocess, sys, time\n"
    "os.environ['TPUGRAPHS_PARENT'] = str(os.getpid())\n"
    "command = [sys.executable, '-m', 'tpugraphs_jax.tuning.compiler', sys.argv[1]]\n"
    "child = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
  )
  parent = subprocess.Popen(
    [sys.executable, "-c", start, str(folder)],
    stdout=subprocess.PIPE,
    env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
  )
  child = int(parent.stdout.readline())
  parent.send_signal(signal.SIGKILL)
  parent.communicate()
  end = time.monotonic() + 100
  while folder.exists() and time.monotonic() < end:
    time.sleep(0.1)
  assert not folder.exists()
  while Path(f"/proc/{child}").exists() and time.monotonic() < end:
    time.sleep(0.1)
  assert not Path(f"/proc/{child}").exists()


def test_the_process_is_in_no_group_whose_signals_it_would_share(child):
  """A group may be ended at once, and nothing would delete the folder."""
  child("exec sleep 60")
  with compiler.Compiler() as made:
    assert os.getpgid(made._process.pid) != os.getpgid(os.getpid())


@recorded.needs_libtpu
@pytest.mark.parametrize("rows", [1024, 65536])  # the arrays are on the chip, or in the HBM
def test_the_memory_of_a_program_is_that_of_its_buffers_in_the_large_memory(rows):
  def loss(weights, x):
    body = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.sum(jax.lax.scan(jax.checkpoint(body), x, weights)[0].astype(jnp.float32))

  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
  args = shape(4, 256, 256), shape(rows, 256)
  with compiler.Compiler() as made:
    program = made.compile(calls.Call(jax.jit(jax.grad(loss)), args, {}), "tpu:v6e")
  live = buffers.live_memory(proto.parse_module(program.module, where="test"))
  assert program.memory.total - program.memory.code == pytest.approx(live.peak_bytes, rel=0.05)


@recorded.needs_libtpu
def test_the_process_compiles_as_this_one_does_and_writes_schedules():
  def step(x):
    with jax.named_scope("layer"):
      return jnp.tanh(x @ x)

  shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  jitted = jax.jit(step, donate_argnums=0)
  call = calls.Call(jitted, (shape,), {})
  with compiler.Compiler() as made:
    apart = made.compile(call, "tpu:v6e")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such"):
      made.compile(call, "tpu:v6e", {"xla_no_such_option": True})
  here = tpu.compile_function(jitted, (shape,), "tpu:v6e")
  assert apart.memory.arguments == here.memory.arguments and apart.flops == here.flops
  assert apart.optimal_seconds == here.optimal_seconds
  assert "TLP" in apart.schedules and not here.schedules


@pytest.mark.parametrize(
  "text, line",
  [
    ("INVALID: no such type\n\nFailed after pass", "INVALID: no such type"),
    (
      "INTERNAL: callback: Traceback (most recent call last):\n  File\nKeyError: 'table'\n",
      "KeyError: 'table'",
    ),
    ("", "ValueError"),
  ],
)
def test_the_reason_of_a_failure_is_a_line(text, line):
  assert compiler.reason(ValueError(text)) == line


def test_a_compiler_that_is_not_open_says_so():
  lowered = compiler.Lowered(b"", "tpu:v6e", {}, (0,))
  with pytest.raises(RuntimeError, match="with label.open"):
    compiler.Compiler().compile_lowered(lowered)


def test_a_folder_is_measured_while_files_and_folders_in_it_are_deleted(tmp_path, monkeypatch):
  for name in ("kept", "gone"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_bytes(bytes(100))
  (tmp_path / "kept" / "deleted").write_bytes(bytes(100))
  scandir, stat = os.scandir, os.stat

  def refuse(function, name):
    def call(path, *args, **kwargs):
      if os.path.basename(path) == name:
        raise FileNotFoundError(path)
      return function(path, *args, **kwargs)

    return call

  monkeypatch.setattr(os, "scandir", refuse(scandir, "gone"))
  monkeypatch.setattr(os, "stat", refuse(stat, "deleted"))
  assert compiler._size(tmp_path) == 100
