"""Writes whole collections, one process per file where there are several processors."""

from __future__ import annotations

from collections.abc import Iterable
import concurrent.futures
import functools
import json
import multiprocessing
import os
from pathlib import Path

import tqdm

from tpugraphs_jax import collections, console, files as files_lib
from tpugraphs_jax.data.synthetic import files, scales

_STAMP = "synthetic.json"


def generate(
    out: str | os.PathLike[str], *, scale: str = "tiny", seed: int = 0,
    collections: Iterable[str] = collections.RELEASED, defects: bool = False,
    limit: int | None = None, workers: int | None = None, progress: bool = True,
) -> Path:
  """Writes synthetic collections in the released form below `<out>/npz`.

  Noise-free runtimes go below `<out>/ceiling`. Files that are there already are
  kept, so that an interrupted run goes on where it stopped.

  Args:
    out: the folder to write into.
    scale: `tiny`, `medium` or `full`.
    seed: every file follows from (scale, seed, collection, split, index).
    collections: which of the five.
    defects: with the defects of the released data.
    limit: files per split; all of them if not given.
    workers: processes; one per processor if not given, one at scale `tiny`.
    progress: shows a bar.

  Returns:
    The data root, `<out>/npz`.

  Raises:
    ValueError: unknown scale or collection, or `out` holds other data.
  """
  out = Path(out).expanduser()
  specs = [spec for collection in collections
           for spec in scales.file_specs(scale, seed, collection, limit=limit)]
  _stamp(out, {"scale": scale, "seed": seed, "defects": defects})
  write = functools.partial(files.write_file, out, with_defects=defects)
  if workers is None:
    workers = 1 if scale == "tiny" else os.cpu_count() or 1
  with tqdm.tqdm(
      total=len(specs), unit="file", mininterval=1, disable=console.bar(progress)) as bar:
    for _ in _run(write, specs, workers):
      bar.update()
  return out / "npz"


def _run(write, specs: list[scales.FileSpec], workers: int):
  if workers == 1:
    yield from map(write, specs)
    return
  # Fresh processes: forking one that runs jax's threads can hang.
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
    futures = [pool.submit(write, spec) for spec in specs]
    for future in concurrent.futures.as_completed(futures):
      yield future.result()


def _stamp(out: Path, settings: dict) -> None:
  """Notes what a folder holds, and refuses to mix it with other data."""
  path = out / _STAMP
  if path.exists():
    found = json.loads(path.read_text())
    if found != settings:
      raise ValueError(f"{out} holds synthetic data of {found}, asked for is {settings}; "
                       "choose another folder or delete this one")
    return
  if (out / "npz").exists():
    raise ValueError(f"{out / 'npz'} exists and is not known to be synthetic data; "
                     "choose another folder")
  with files_lib.replacing(path) as file:
    json.dump(settings, file)
