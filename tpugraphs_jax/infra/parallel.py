"""Devices and processes of a run: steps on all of them, and the exchange between processes.

A step is written for one device and runs on all of them through `pmap`. Inside a step
`jax.lax.pmean(x, DEVICES)` reduces over all devices of all processes. Arguments and results of a
step have a leading axis, with an entry per local device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import glob
import importlib.util
import os
from pathlib import Path
import pickle
import socket
import sys
import traceback
from typing import Any, ParamSpec, TypeVar

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from tpugraphs_jax.infra import console, machine

DEVICES = "devices"  # name of the mapped axis
_EMITTERS_KNOWN_UNTIL = (0, 11)  # of jaxlib, see `compile_quickly`
_SLOW_SUMS = (0, 10, 2), (0, 11, 2)  # of jaxlib: the first slow one, and the first mended one
_ATOMICS, _DETERMINISTIC = "nvptx-allow-ftz-atomics", "xla_gpu_deterministic_ops"
process_count, process_index = jax.process_count, jax.process_index
local_device_count = jax.local_device_count
device_count = jax.device_count  # over all processes
Args = ParamSpec("Args")
Value = TypeVar("Value")  # a pytree, or an object that can be pickled
_AGAIN = "start all of them again with --resume to go on from the newest checkpoint"


_is_forked = False  # whether this process was forked from one in which jax had begun


def _note_fork() -> None:
  """Runs in a forked process, which has the backends of jax and none of their threads."""
  global _is_forked
  _is_forked = bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))


os.register_at_fork(after_in_child=_note_fork)


def initialize(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  heartbeat_timeout_seconds: int = 40,
) -> None:
  """Joins the processes of a run; call it before anything else uses jax.

  Without arguments jax finds the other hosts of a machine with TPU chips. Any other machine runs
  alone.

  Args:
    coordinator_address: `host:port` of process 0.
    num_processes: number of processes, equal everywhere.
    process_id: 0 .. num_processes - 1, different everywhere.
    heartbeat_timeout_seconds: jax's coordination service ends all processes if a process sends no
      heartbeat for so long.

  Raises:
    ValueError: some of the three arguments given, but not all, or out of range.
  """
  given: dict[str, Any] = {
    "coordinator_address": coordinator_address or None,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == len(given):
    if importlib.util.find_spec("libtpu") is not None and machine.has_tpu_chips():
      _initialize_from_surroundings(heartbeat_timeout_seconds)
    return
  if missing or num_processes is None or process_id is None:
    raise ValueError(
      f"several processes need all of --{', --'.join(given)}; missing: --{', --'.join(missing)}"
    )
  if num_processes < 1:
    raise ValueError(f"--num_processes is {num_processes}, expected at least 1")
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f"--process_id is {process_id}, expected 0 to {num_processes - 1}"
      f" (--num_processes={num_processes})"
    )
  if num_processes == 1:
    return
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  _join(heartbeat_timeout_seconds, **given)


def _join(heartbeat_timeout_seconds: int, **given: Any) -> None:
  """Joins the processes; prints a line with their hosts, and advice for the end of one of them."""
  if hasattr(jax.config, "jax_enable_preemption_service"):  # not in jax 0.7.2
    jax.config.update("jax_enable_preemption_service", False)  # which would swallow SIGTERM
  jax.distributed.initialize(
    **given,
    heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    shutdown_timeout_seconds=heartbeat_timeout_seconds,
  )
  if process_count() > 1:
    hosts = enumerate(gather_objects((socket.gethostname(), os.getpid())))
    names = ", ".join(f"process {i} on {host} (process id {number})" for i, (host, number) in hosts)
    print(
      f"Process {process_index()} of {process_count()}: {names}. If one of them ends or is "
      f"silent for {heartbeat_timeout_seconds} s, jax ends all processes: look at the output of "
      f"the process that ended first, then {_AGAIN}",
      file=sys.stderr,
      flush=True,
    )


def leave_out_missing_tpu() -> None:
  """Keeps jax from loading libtpu, which logs errors where it finds no TPU.

  It does so only on a machine without any sign of a TPU or a GPU, and unless the user names
  platforms.
  """
  gpus = "/dev/nvidia*", "/dev/kfd", "/dev/dxg"
  platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
  if not platforms and not any(map(glob.glob, gpus)) and not machine.may_have_tpu():
    jax.config.update("jax_platforms", "cpu")


def _initialize_from_surroundings(heartbeat_timeout_seconds: int) -> None:
  try:
    _join(heartbeat_timeout_seconds)
  except Exception as error:  # Many kinds, by service: notebooks have no metadata.
    # A single host needs none of it; in a pod the devices tell that there are others.
    if jax.process_count() > 1:
      raise
    logging.info(f"One TPU host without jax.distributed ({error})")


def use_compilation_cache(folder: str | os.PathLike) -> None:
  """Keeps compiled programs in `folder` for the next run; call before jax compiles.

  A folder that the user has chosen (`JAX_COMPILATION_CACHE_DIR`) stays.
  """
  if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))


def compile_quickly() -> None:
  """Lets XLA compile for CPUs in less than half the time; call before jax computes.

  Use it for runs of a few steps: a step takes two to three times as long. It has no effect unless
  the user chose CPUs as jax's platform, and it does not replace flags of the user. XLA ends the
  process at an unknown flag. The newest flag is therefore set only for known versions without
  libtpu, whose XLA lacks it.
  """
  if jax.config.jax_platforms != "cpu":  # type: ignore[attr-defined]
    return
  flags = ["xla_backend_optimization_level=0", "xla_llvm_disable_expensive_passes=true"]
  has_libtpu = importlib.util.find_spec("libtpu") is not None
  if jaxlib.version.__version_info__ < _EMITTERS_KNOWN_UNTIL and not has_libtpu:
    flags.append("xla_cpu_use_fusion_emitters=false")
  _add_xla_flags(flags)


def compute_deterministically() -> None:
  """Lets XLA add up in the same order in every run; call before jax computes.

  CPUs and TPUs always do. Threads of a GPU add to a location in any order, and float32 sums depend
  on the order.
  """
  _add_xla_flags([f"{_DETERMINISTIC}=true"])


def check_deterministic() -> None:
  """Refuses (ValueError) GPUs that may add up in another order in every run."""
  if jax.default_backend() == "gpu" and _DETERMINISTIC not in _xla_flags():
    raise ValueError(
      "train.deterministic is True, but XLA was started without its flag: set "
      f"XLA_FLAGS=--{_DETERMINISTIC}=true before jax is imported"
    )


def warn_of_slow_sums() -> None:
  """Warns of versions of jaxlib that compile sums over rows for NVIDIA GPUs into loops.

  Source: issue 38806 of jax-ml/jax.
  """
  first, fixed = _SLOW_SUMS
  version, flags = jaxlib.version.__version_info__, _xla_flags()
  is_slow = jax.default_backend() == "gpu" and first <= version < fixed
  if is_slow and _ATOMICS not in flags and _DETERMINISTIC not in flags:
    logging.warning(
      f"jaxlib {jaxlib.version.__version__} adds up rows on NVIDIA GPUs by loops of "
      "compare-and-swap, which can take hundreds of times longer: install a version before 0.10.2 "
      'or from 0.11.2 on (pip install ".[cuda12]" chooses one), or set '
      f"XLA_FLAGS=--xla_backend_extra_options=--{_ATOMICS}"
    )


def _add_xla_flags(flags: Sequence[str]) -> None:
  """Adds flags `name=value` to `XLA_FLAGS`, except flags that the user has set."""
  present = _xla_flags()
  new = [f"--{flag}" for flag in flags if flag.partition("=")[0] not in present]
  os.environ["XLA_FLAGS"] = " ".join([*present.split(), *new])


def _xla_flags() -> str:
  """The flags of `XLA_FLAGS`, which may name a file of them: then it does not begin with `-`.

  Raises:
    ValueError: the file cannot be read. XLA would end the process.
  """
  value = os.environ.get("XLA_FLAGS", "").strip()
  if not value or value.startswith("-"):
    return value
  try:
    return Path(value).read_text()
  except (OSError, ValueError) as error:
    raise ValueError(
      f"XLA_FLAGS is {value!r}, expected flags, which begin with --, or the name of a file of "
      f"flags ({console.one_line(error)})"
    ) from None


def per_device(batch_size: int, *, field: str = "batch_size") -> int:
  """The share of one device in a batch of `batch_size`.

  Raises:
    ValueError: the batch does not divide by the number of devices.
  """
  devices = device_count()
  if batch_size < 1 or batch_size % devices:
    raise ValueError(
      f"{field} is {batch_size}, expected a positive multiple of the {devices}"
      f" devices ({process_count()} processes with {local_device_count()} each)"
    )
  return batch_size // devices


def pmap(
  function: Callable[..., Any],
  *,
  donate_argnums: int | Sequence[int] = (),
  local: bool = False,
  in_axes: Any = 0,
  devices: Sequence[jax.Device] | None = None,
) -> Callable[..., Any]:
  """`function` on each local device, with the axis name `DEVICES` and without the caller's mesh.

  Args:
    function: of one device.
    donate_argnums: arguments whose memory the results may take.
    local: the function reduces over nothing, and processes may call it a different
      number of times; without it all must call alike.
    in_axes: 0, or for each argument 0 or None; None for one that all devices share.
    devices: the devices to run on or to compile for, instead of the devices of this run; also
      devices of another machine.
  """
  if devices is None and local:
    devices = jax.local_devices()
  mapped = jax.pmap(
    function, axis_name=DEVICES, donate_argnums=donate_argnums, in_axes=in_axes, devices=devices
  )
  without_mesh = no_mesh()(mapped)
  without_mesh.lower = mapped.lower  # type: ignore[attr-defined]  # jax 0.7 has it in no `__dict__`
  return without_mesh


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
  """Inside, and in functions that it decorates, there is no mesh of `jax.set_mesh`."""
  with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
    yield


def replicate(tree: Value) -> Value:
  """Copies every array onto all local devices: `[...]` to `[devices, ...]`.

  Raises:
    RuntimeError: in a forked process, which would wait for threads of jax that it does not have.
  """
  if _is_forked:
    raise RuntimeError(
      "this process was forked from one in which jax was running, and jax would wait here for "
      "ever: start processes with multiprocessing.get_context('spawn')"
    )
  mesh = jax.sharding.Mesh(jax.local_devices(), (DEVICES,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(DEVICES))
  repeated = jax.tree.map(lambda array: np.broadcast_to(array, (mesh.size, *np.shape(array))), tree)
  return jax.device_put(repeated, sharding)


def unreplicate(tree: Value) -> Value:
  """The first local device's part of every array, as numpy: `[devices, ...]` to `[...]`.

  A copy, so that the result outlives a step that donates the arrays.
  """

  def first(array: jax.Array) -> np.ndarray:
    # Not array[0]: indexing would gather from all devices first.
    shard = array.addressable_shards[0].data
    return np.array(shard).reshape(array.shape[1:])

  return jax.tree.map(first, tree)


def stack_for_devices(trees: Sequence[Value]) -> Value:
  """One pytree of numpy arrays per local device to one with a leading axis.

  Raises:
    ValueError: not one tree per local device, or shapes that differ.
  """
  if len(trees) != local_device_count():
    raise ValueError(f"{len(trees)} per-device batches for {local_device_count()} local devices")
  # One device, which is the common case, needs no copy.
  stack = lambda *arrays: np.stack(arrays) if len(arrays) > 1 else np.asarray(arrays[0])[None]
  return jax.tree.map(stack, trees[0], *trees[1:])


def slate_keys(key: jax.Array, slates: int) -> jax.Array:
  """The key of each slate of this device, `[slates]`, from the place of the slate in the batch.

  Row `i` of device `d` has the place `d * slates + i`: the slates of a batch fill the devices in
  order, and only the last rows of the batch are padding (`data.plan.BatchPlan`). So a slate has the
  same key on any number of devices, also in a batch that is not full.

  Args:
    key: of the step.
    slates: rows of the batch of a device, with padding; the same number on every device.
  """
  first = jax.lax.axis_index(DEVICES) * slates
  return jax.vmap(lambda slate: jax.random.fold_in(key, slate))(first + jnp.arange(slates))


@contextlib.contextmanager
def explaining_memory(advice: str) -> Iterator[None]:
  """Turns a lack of device memory into a ValueError of one line with `advice` behind it."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise ValueError(f"{str(error).splitlines()[0].rstrip('.')}; {advice}") from error


def free_memory() -> int:
  """Bytes that each local device can still take; devices of the CPU share the machine's memory."""
  stats = [device.memory_stats() for device in jax.local_devices()]
  if not all(stats):
    return machine.available() // len(stats)
  return min(device["bytes_limit"] - device["bytes_in_use"] for device in stats)


def memory_of(step: Any, *args: Any) -> int:
  """Bytes that a mapped function takes on each device, with its arguments; compiles it."""
  sizes = step.lower(*args).compile().memory_analysis()
  return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes


def barrier(name: str) -> None:
  """Waits until every process has come here."""
  if process_count() > 1:
    multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
  """Whether `flag` is true in at least one process; every process must ask."""
  if process_count() == 1:
    return bool(flag)
  return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def gather_objects(value: Value) -> list[Value]:
  """The values of all processes by process index; every process must take part."""
  if process_count() == 1:
    return [value]
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  sizes = multihost_utils.process_allgather(np.asarray(data.size, np.int32))
  padded = np.zeros(sizes.max(), np.uint8)
  padded[: data.size] = data
  rows = multihost_utils.process_allgather(padded)
  return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_primary(value: Value) -> Value:
  """The value of process 0, bit for bit, in every process."""
  if process_count() == 1:
    return value
  data = np.frombuffer(pickle.dumps(value if machine.is_primary() else None), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.asarray(data.size, np.int32)))
  data = data if machine.is_primary() else np.zeros(size, np.uint8)
  return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())


def primary_only(write: Callable[Args, Value]) -> Callable[Args, Value | None]:
  """Decorates a function that writes: it runs in process 0, and returns None in other processes."""

  @functools.wraps(write)
  def run(*args: Args.args, **kwargs: Args.kwargs) -> Value | None:
    return write(*args, **kwargs) if machine.is_primary() else None

  return run


def on_primary(read: Callable[[], Value]) -> Value:
  """The result of `read` in process 0, or its ValueError or OSError, in every process."""
  values: list[Value] = []  # one in process 0, unless there is an error
  error: Exception | None = None
  if machine.is_primary():
    try:
      values.append(read())
    except (ValueError, OSError) as raised:
      error = raised
  values, error = from_primary((values, error))
  if error is not None:
    raise error
  return values[0]


def copy_from_primary(
  read: Callable[[], np.ndarray], target: np.ndarray, *, block_bytes: int = 2**26
) -> None:
  """Fills `target` with an array of process 0, block by block of rows.

  Every process needs memory for one block beside the two arrays.

  Args:
    read: returns an array `[n, ...]` like `target`; called in process 0 alone.
    target: `[n, ...]`, written in every process.
    block_bytes: size of a block.
  """
  source = primary_only(read)()
  rows = max(1, block_bytes // max(1, target[:1].nbytes))
  for start in range(0, len(target), rows):
    stop = start + rows
    target[start:stop] = from_primary(None if source is None else source[start:stop])


@contextlib.contextmanager
def stop_together() -> Iterator[None]:
  """Ends this process at once when an error comes up while others wait for it.

  An ordinary exit waits for all other processes. They wait for this process in a reduction, so no
  process would end. An abrupt end closes the connections of this process. Then a reduction
  of another process fails, or jax's coordination service ends it.
  """
  try:
    yield
  except (Exception, KeyboardInterrupt) as error:
    if process_count() == 1:
      raise
    traceback.print_exc()
    first = (str(error).splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first}".rstrip(".: ")
    print(
      f"error: process {process_index()} of {process_count()} stops ({reason}), and all "
      "other processes with it. If this is a failed connection, look for the first error in the "
      f"output of the other processes. Then {_AGAIN}",
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)
