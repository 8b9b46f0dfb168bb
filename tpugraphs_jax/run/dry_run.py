"""`--dry_run`: the disk, memory and time that a run takes, before it is started.

Sizes come from the files, or from published sizes where there are no files. Seconds come
from a few steps and an evaluation of a few graphs, in a folder that is removed afterwards:
neither the working folder nor the store is touched.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
import dataclasses
from pathlib import Path
import shutil
import time
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from tpugraphs_jax import rankers
from tpugraphs_jax.collections import Collection
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import download, graph_folder, npz, store
from tpugraphs_jax.data.plan import BatchPlan
from tpugraphs_jax.graph import SPLITS
from tpugraphs_jax.infra import console, parallel, remote
from tpugraphs_jax.run import job as job_lib
from tpugraphs_jax.run import training
from tpugraphs_jax.train import log, loop

_STEPS = 8  # measured, besides the steps that compile
_SECONDS = 60.0  # of measured steps, after which no further one is taken
_GRAPHS = 4  # of the validation split, measured


@dataclasses.dataclass(frozen=True)
class Measured:
  """Seconds measured on a few steps, and on the evaluation of a few graphs.

  Attributes:
    steps: number of measured steps, without those that compiled.
    step: of a step, on average.
    compilation: of a batch shape, on average; each shape is compiled once.
    evaluation: of one evaluation during training.
    final: of the evaluation after training.
  """

  steps: int
  step: float
  compilation: float
  evaluation: float
  final: float


def lines(config: ml_collections.ConfigDict, scratch: Path) -> Iterator[str]:
  """Yields the lines of a dry run, each as soon as it is known.

  Args:
    config: of the run, with `data_root`, where nothing has to be.
    scratch: an empty folder for the files of the measured steps.

  Raises:
    ValueError: the config cannot work, or a file of the data is malformed.
  """
  job, is_ready = job_lib.Job.of(config), True
  for data in (job.data, *job.also):
    is_ready &= yield from _collection_lines(config, data.collection, scratch)
  if is_ready:
    yield from _time_lines(config, *measure(job, scratch))


def _collection_lines(
    config: ml_collections.ConfigDict, collection: Collection, scratch: Path
) -> Generator[str, None, bool]:
  """Yields the sizes of a collection; returns whether a run can be measured on it."""
  yield f"collection  {collection.name}"
  there = [split for split in SPLITS if npz.files_there(config.data_root, collection.name, split)]
  yield from _data_lines(config, collection, there)
  if not {"train", "valid"} <= set(there):
    only = f"only {', '.join(there)}" if there else "no data"
    yield (f"time        not measured, which needs the splits train and valid: {only} at "
           f"{config.data_root}")
    return False
  if collection.kind == "layout":
    missing, text = _store_lines(config, collection, there, scratch)
    yield text
    if missing:
      yield (f"time        not measured: build the store first (python -m tpugraphs_jax.data.store "
             f"build --data_root {config.data_root} --collection {collection.name})")
      return False
  yield from _host_lines(config, collection)
  return True


def _data_lines(
    config: ml_collections.ConfigDict, collection: Collection, there: Sequence[str]
) -> Iterator[str]:
  here = sum(path.stat().st_size for split in there
             for path in npz.files_there(config.data_root, collection.name, split))
  if there:
    yield f"files       {console.size(here)} in {config.data_root} ({', '.join(there)})"
  if not there and collection.is_released:
    published = download.PUBLISHED[collection.name]
    size = console.size(1e9 * published.gigabytes)
    yield (f"download    about {size}, twice that while it is unpacked: python -m "
           f"tpugraphs_jax.data.download --data_root {config.data_root} "
           f"--collections {collection.name}")
    if collection.kind == "layout":
      yield f"store       at most about {console.size(1e9 * published.store_gigabytes)}"
  place = remote.local_of(config.data_root).absolute()
  while not place.exists():
    place = place.parent
  yield f"disk        {console.size(shutil.disk_usage(place).free)} free at {place}"


def _number(count: int, what: str) -> str:
  """A number of things in words: `1 device`, `2 devices`."""
  return f"{count:,} {what}{'s' * (count != 1)}"


def _store_lines(
    config: ml_collections.ConfigDict, collection: Collection, there: Sequence[str], scratch: Path
) -> tuple[bool, str]:
  """Whether the store has to be built before anything can be measured, and its size."""
  stored, missing, bound = 0, 0, 0
  for split in there:
    folders = store.graph_folders(
        config.data_root, collection.name, split, store_dir=config.data.store_dir or None)
    for file, folder in folders.items():
      if not graph_folder.why_outdated(folder, file):
        stored += sum(path.stat().st_size for path in folder.iterdir())
      else:
        missing, bound = missing + 1, bound + _stored_bytes(file)
  text = f"store       {console.size(stored)}"
  if missing:
    text += (f", and at most about {console.size(bound)} for {_number(missing, 'graph')} not yet "
             "in it")
  is_own = Path(config.data_root).is_relative_to(scratch)
  return bool(missing) and not is_own, text


def _stored_bytes(file: Path) -> int:
  """Upper bound of the bytes of a graph's large arrays in the store.

  Each configuration has a number of at most one byte for every configurable node.
  """
  with npz.NpzArchive(file) as archive:
    configs, config_nodes, _ = archive.member("node_config_feat").shape
    (nodes,) = archive.member("node_opcode").shape
    edges, _ = archive.member("edge_index").shape
  return configs * (config_nodes + 8) + nodes * (4 * NODE_FEATURES + 1) + 8 * edges


def _host_lines(config: ml_collections.ConfigDict, collection: Collection) -> Iterator[str]:
  folder = Path(*collection.name.split(":"))
  what = f"{config.data_root}/{folder}"
  if collection.kind == "layout":
    what += f" and {config.data.store_dir or f'{config.data_root}/store'}/{folder}"
  yield f"hosts       each of them reads {what}; process 0 alone reads and writes --workdir"


def measure(job: job_lib.Job, scratch: Path) -> tuple[loop.Training, int, Measured]:
  """Takes a few steps of the first stage and judges a few graphs.

  Args:
    job: with data that can be loaded.
    scratch: an empty folder.

  Returns:
    The stage, the number of its batch shapes, and what was measured.
  """
  graphs, valid = job_lib.prepare(job, scratch, resume=False)
  stage, plan = training.first_stage(job, graphs, scratch)
  state, first, later = _steps(stage, plan)
  params, scorer = parallel.unreplicate(state.eval_params), job.ranker.family.scorer()
  sampled, final = _evaluation(job, scorer, params, valid)
  for other, _ in job.judged_in(scratch)[:-1]:  # which are judged after training alone
    graphs = job.prepare(job_lib.judged(other.data.load(job.config.data_root, "valid")))
    final += _evaluation(other, scorer, params, graphs)[1]
  step = float(np.mean(later))
  return stage, len(plan.budgets), Measured(
      len(later), step, max(0.0, float(np.mean(first)) - step), sampled, final)


def _steps(stage: loop.Training, plan: BatchPlan) -> tuple[Any, list[float], list[float]]:
  """Seconds of the first step of each shape, and of others."""
  state, first, later, seen = parallel.replicate(stage.state), [], [], set()
  for step in range(stage.total_steps):
    shape = tuple(plan.budget(step).values())
    since = time.monotonic()
    state, metrics = stage.train_step(state, next(stage.batches))
    jax.block_until_ready(metrics)
    (later if shape in seen else first).append(time.monotonic() - since)
    seen.add(shape)
    if len(later) == _STEPS or sum(later) > _SECONDS:
      break
  return state, first, later or first


def _evaluation(
    job: job_lib.Job, scorer: Any, params: Any, valid: Sequence[Any]
) -> tuple[float, float]:
  """Seconds of an evaluation during training, and of the last one, from a few graphs."""
  sampled, ids = training.validation_sample(job.config, valid)(0)
  order = sorted(range(len(sampled)), key=lambda i: len(sampled[i].opcode))
  chosen = sorted({order[i] for i in np.linspace(0, len(order) - 1, _GRAPHS).round().astype(int)})
  graphs, some = [sampled[i] for i in chosen], [ids[i] for i in chosen]
  score = lambda: scorer(params, graphs, some)
  score()  # compiles
  since = time.monotonic()
  score()
  rate = (time.monotonic() - since) / _work(graphs, some)
  every = [job.data.validation_ids(graph.name, graph.configs) for graph in valid]
  return rate * _work(sampled, ids), rate * _work(valid, every)


def _work(graphs: Sequence[Any], ids: Sequence[np.ndarray]) -> int:
  """Nodes times configurations."""
  return sum(len(graph.opcode) * len(chosen) for graph, chosen in zip(graphs, ids))


def _time_lines(
    config: ml_collections.ConfigDict, stage: loop.Training, shapes: int, measured: Measured
) -> Iterator[str]:
  steps = stage.total_steps
  evaluations = -(-stage.epochs // config.train.eval_every_epochs)
  parameters = optax.tree.size(stage.state.params)
  total = (steps * measured.step + shapes * measured.compilation
           + evaluations * measured.evaluation + measured.final)
  what, peak_bytes = log.peak_memory()
  yield (f"memory      {console.size(peak_bytes)} of the {what} at its peak, "
         f"{parameters:,} parameters")
  yield (f"checkpoints about {console.size(2 * 12 * parameters)}: two, each with parameters and "
         "two moments of Adam")
  yield (f"compiles    {_number(shapes, 'batch shape')} of training, {measured.compilation:.1f} s "
         "each; a shared compilation cache saves this in later runs")
  yield (f"steps       {steps:,} of {measured.step:.3g} s (mean of {measured.steps} measured), "
         f"{_number(evaluations, 'evaluation')} of {measured.evaluation:.3g} s, the last one of "
         f"{measured.final:.3g} s")
  yield (f"time        about {console.duration(total)} on "
         f"{_number(jax.device_count(), 'device')} like these")
  if rankers.last_folder(config):
    yield "            and then the head alone, which was not measured"
