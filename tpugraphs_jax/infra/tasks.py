"""Many independent tasks: in processes of this machine, or on a cluster by Apache Beam.

Tasks must be repeatable: a cluster may start one twice. `StopSignals` stops work on SIGTERM and
Ctrl-C without losing it. No process that is started here takes modules from the current folder in
place of Python's or of installed ones: the folder may be from somebody else, and have a `numpy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import multiprocessing
import os
from pathlib import Path
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, NoReturn, TypeVar

from tpugraphs_jax.infra import console

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_SECONDS = 0.2  # between two looks at the process that started this one
_ROOT = Path(__file__).parents[2]  # of the package
_SAFE_PATH = "PYTHONSAFEPATH"  # environment variable: as `python -P`


def python_command(*arguments: str) -> list[str]:
  """The command of a Python process, for the environment `python_environment()`."""
  return [sys.executable, "-P", *arguments]


def python_environment() -> dict[str, str]:
  """The environment of a Python process that finds this package."""
  places = filter(None, (os.environ.get("PYTHONPATH"), str(_ROOT)))
  return os.environ | {"PYTHONPATH": os.pathsep.join(places)}


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
  """Processes that multiprocessing starts inside begin as `python -P` does.

  They take over `sys.path` of this process before they import a task.
  """
  before = os.environ.get(_SAFE_PATH)
  os.environ[_SAFE_PATH] = "1"
  try:
    yield
  finally:
    del os.environ[_SAFE_PATH]
    if before is not None:
      os.environ[_SAFE_PATH] = before


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
  """A command's own arguments, and Beam's flags behind `--`; None where there is no `--`."""
  items = list(argv)
  if "--" not in items:
    return items, None
  place = items.index("--")
  return items[:place], items[place + 1 :]


def run(
  work: Callable[[_Task], _Result],
  tasks: Sequence[_Task],
  *,
  processes: int = 1,
  beam: Sequence[str] | None = None,
  finished: Callable[[_Result], object] = lambda result: None,
) -> list[_Result]:
  """Does every task; returns when the last one has ended.

  Args:
    work: does one task. A function of a module, since other processes have to find it.
    tasks: arguments of `work` that can be pickled, such as tuples and dataclasses.
    processes: tasks at a time on this machine; 1 = in this process.
    beam: flags of Apache Beam, such as `--runner=FlinkRunner`, to run on a cluster; None = here.
      A cluster returns no results: a task leaves its result in a place that all machines see.
    finished: called with each result as its task ends; an error that it raises ends the rest.

  Returns:
    Results in the order of the tasks; empty with `beam`.

  Raises:
    ImportError: Beam is not installed.
    OSError: a process was killed.

  Examples:
    >>> run(abs, [-1, 2, -3])
    [1, 2, 3]
  """
  if beam is not None:
    run_on_beam(work, tasks, processes=processes, options=beam)
    return []
  processes = min(processes, len(tasks))
  if processes <= 1:
    results = []
    for task in tasks:
      results.append(work(task))
      finished(results[-1])
    return results
  with _safe_path():
    return _run_in_pool(work, tasks, processes, finished)


def _run_in_pool(
  work: Callable[[_Task], _Result],
  tasks: Sequence[_Task],
  processes: int,
  finished: Callable[[_Result], object],
) -> list[_Result]:
  # Fresh processes: a fork of one that has threads (jax, absl) can hang.
  spawn = multiprocessing.get_context("spawn")
  pool = concurrent.futures.ProcessPoolExecutor(processes, spawn, _begin_process, (os.getpid(),))
  try:
    pending = [pool.submit(work, task) for task in tasks]
    for future in concurrent.futures.as_completed(pending):
      finished(future.result())
    return [future.result() for future in pending]
  except concurrent.futures.process.BrokenProcessPool as error:
    raise OSError(
      "a process was killed, out of memory perhaps: run again with fewer processes, "
      "finished tasks are kept"
    ) from error
  except SystemExit:  # of `stopping`: the other processes were not asked to end
    for child in multiprocessing.active_children():
      child.terminate()
    raise
  finally:
    pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def stopping(*numbers: int) -> Iterator[None]:
  """Signals raise an error in the block, which then ends the processes that it has started.

  Args:
    *numbers: of the signals; SIGTERM if there are none.
  """
  previous = {number: signal.signal(number, _exit) for number in numbers or (signal.SIGTERM,)}
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


def _exit(number: int, frame: object) -> NoReturn:
  del frame
  signal.signal(number, signal.SIG_IGN)  # once is enough
  raise SystemExit(128 + number)


PARENT = "TPUGRAPHS_PARENT"  # environment variable: id of the process that started this one


def end_with_parent(number: int = signal.SIGKILL, *, parent: int | None = None) -> None:
  """Sends this process a signal once the process that started it has ended.

  Args:
    number: the signal.
    parent: id of the process that started this one, which may have ended already. The default is
      the value of the variable `PARENT`, else the parent at this call.
  """
  parent = parent or int(os.environ.pop(PARENT, os.getppid()))

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(_SECONDS)
    os.kill(os.getpid(), number)

  threading.Thread(target=watch, name="parent", daemon=True).start()


def _begin_process(parent: int) -> None:
  """Leaves Ctrl-C to the process that started this one, and ends with it."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, _exit)
  end_with_parent(parent=parent)


def run_on_beam(
  work: Callable[[_Task], object],
  tasks: Sequence[_Task],
  *,
  processes: int = 1,
  options: Sequence[str] = (),
) -> None:
  """Does every task on Apache Beam: on this machine unless `options` name a `--runner`."""
  try:
    import apache_beam as beam
    from apache_beam.options import pipeline_options
  except ImportError as error:
    raise ImportError(f"apache-beam is missing: {console.to_install('beam')}") from error
  if not tasks:
    return
  flags = list(options)
  if not any(option.startswith("--runner") for option in flags):
    # Threads of this process: long work starts processes itself.
    flags += [
      "--runner=FnApiRunner",
      "--direct_running_mode=multi_threading",
      f"--direct_num_workers={min(processes, len(tasks))}",
    ]
  with beam.Pipeline(options=pipeline_options.PipelineOptions(flags)) as pipeline:
    _ = pipeline | beam.Create(list(tasks)) | beam.Reshuffle() | beam.Map(work)


def exit_at_once(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> NoReturn:
  """Ends this process with the exit status of `main`, also if a thread has not ended.

  Python would wait for threads that a program of the user has left behind, perhaps forever.
  """
  try:
    status = main(argv)
  except SystemExit as error:
    status = error.code if isinstance(error.code, int) else int(error.code is not None)
    if not isinstance(error.code, (int, type(None))):
      print(error.code, file=sys.stderr)
  except BaseException:  # as Python does
    traceback.print_exc()
    status = 1
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
      stream.flush()
  os._exit(status)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
  """Inside, SIGTERM and Ctrl-C wait until the block ends; in another thread it does nothing."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  received: list[int] = []
  note = lambda number, frame: received.append(number)
  handlers = [(number, signal.signal(number, note)) for number in _STOP_SIGNALS]
  try:
    yield
  finally:
    for number, handler in handlers:
      signal.signal(number, handler)
    for name in received:
      signal.raise_signal(name)


# Stopping without losing work.

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
  """A signal came during work that can be redone."""


class StopSignals:
  """Turns SIGTERM and Ctrl-C into a request to stop; a second one ends the process.

  The second signal saves nothing: the run can resume from its newest checkpoint. A call into a
  library, such as a compilation, returns before the process ends.
  """

  def __init__(self):
    self.received: int | None = None
    self._may_interrupt = False
    self._handlers: dict[int, Any] = {}

  def __enter__(self) -> StopSignals:
    if threading.current_thread() is threading.main_thread():
      self._handlers = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS}
    return self

  def __exit__(self, *error: object) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)

  def _receive(self, number: int, frame: FrameType | None) -> None:
    del frame
    for stop in _STOP_SIGNALS:
      signal.signal(stop, signal.SIG_DFL)
    self.received = number
    if self._may_interrupt:
      raise Interrupted

  @contextlib.contextmanager
  def interrupting(self) -> Iterator[None]:
    """Inside, a signal raises `Interrupted` at once: for work that can be redone.

    With several processes a signal waits, because the others would wait for this process.
    """
    from tpugraphs_jax.infra import parallel  # imports jax, which few tasks need

    self._may_interrupt = parallel.process_count() == 1
    try:
      if self._may_interrupt and self.received is not None:
        raise Interrupted
      yield
    finally:
      self._may_interrupt = False
