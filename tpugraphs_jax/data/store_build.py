"""Builds graphs of the store: in this process, in several, or on the machines of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import multiprocessing
import os
from pathlib import Path
import signal
import threading

import tqdm

from tpugraphs_jax import beam_jobs, console
from tpugraphs_jax.data import npz, store_format

# Bytes of files below which starting processes takes longer than the work.
_WORTH_PROCESSES = 4 << 20


def build(
    todo: dict[Path, Path], *, workers: int | None, stop_at_error: bool, bar: str | None,
    beam: Sequence[str] | None = None,
) -> dict[Path, npz.NpzError]:
  """Builds graphs, the largest files first; the malformed ones and their errors.

  Args:
    todo: the folder of the store for every file that is to be read.
    workers: processes here; by default one per CPU, or one alone where there is little to do.
    stop_at_error: whether the first malformed file ends the build.
    bar: name of the progress bar, or None for no bar.
    beam: flags of Apache Beam, on whose machines the graphs are built; None = here. The
      machines see files and store under the same names.

  Raises:
    npz.NpzError: a file is malformed, with `stop_at_error`.
    OSError: the store cannot be written, or a process was killed.
    ImportError: Beam is not installed.
  """
  jobs = sorted(todo.items(), key=lambda job: job[0].stat().st_size, reverse=True)
  if beam is not None:
    beam_jobs.run_all(_attempt, jobs, processes=workers or os.cpu_count() or 1, options=beam)
    workers = 1  # what follows looks at every graph and builds what is missing
  bad = {}
  with contextlib.closing(_run(jobs, workers=workers)) as results, tqdm.tqdm(
      total=sum(file.stat().st_size for file, _ in jobs), desc=f"store {bar}", unit="B",
      unit_scale=True, disable=console.bar(bar is not None)) as progress:
    for file, error in results:
      if error is not None and stop_at_error:
        raise error
      if error is not None:
        bad[file] = error
      progress.update(file.stat().st_size)
  return bad


def _run(
    jobs: list[tuple[Path, Path]], *, workers: int | None
) -> Iterator[tuple[Path, npz.NpzError | None]]:
  """Builds every job, in this process or several; yields them as they end."""
  if workers is None:
    is_small = sum(file.stat().st_size for file, _ in jobs) < _WORTH_PROCESSES
    workers = 1 if is_small else os.cpu_count() or 1
  workers = min(workers, len(jobs))
  if workers <= 1:
    yield from map(_build_graph, jobs)
    return
  pool = concurrent.futures.ProcessPoolExecutor(
      workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker)
  try:
    futures = [pool.submit(_build_graph, job) for job in jobs]
    for future in concurrent.futures.as_completed(futures):
      yield future.result()
  except concurrent.futures.process.BrokenProcessPool as error:
    raise OSError("a process that built the store was killed, out of memory perhaps; "
                  "run again with fewer workers, what is finished is kept") from error
  finally:
    pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
  """Leaves Ctrl-C to the process that started this one, and ends with it however it ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  parent = multiprocessing.parent_process()
  end_with_it = lambda: parent.join() or os._exit(1)
  threading.Thread(target=end_with_it, name="parent", daemon=True).start()


def _attempt(job: tuple[Path, Path]) -> None:
  """Builds a graph on a machine of a cluster; who asked for it is told of errors, not this one."""
  with contextlib.suppress(OSError):
    _build_graph(job)


def _build_graph(job: tuple[Path, Path]) -> tuple[Path, npz.NpzError | None]:
  """Brings one graph of the store up to date; the error of a malformed file."""
  file, folder = job
  if store_format.renew_source(folder, file):
    return file, None
  state = store_format.fingerprint(file)
  try:
    op_graph = npz.read_layout(file)
  except npz.NpzError as error:
    return file, error
  store_format.write_graph(folder, op_graph, source=file, source_state=state)
  return file, None
