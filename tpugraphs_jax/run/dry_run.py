"""`--dry_run`: disk, memory and time of a run, before it starts.

Sizes come from the files, or from published sizes where the data is missing. Seconds come from a
few steps and an evaluation of a few graphs in a temporary folder: the working folder and the store
stay as they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
import shutil
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import download, graph_folder, npz, store
from tpugraphs_jax.data.plan import BatchPlan
from tpugraphs_jax.data.selection import Data
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.graph import SPLITS
from tpugraphs_jax.infra import console, files, parallel
from tpugraphs_jax.rankers.config import Config, LayoutDataOptions
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.train import log, training
from tpugraphs_jax.train.loading import data_of, evaluable, load_graphs
from tpugraphs_jax.train.session import Training
from tpugraphs_jax.train.step import TrainState

_STEPS = 8  # number of measured steps, without steps that compile
_SECONDS = 60.0  # measurement of steps ends after this time
_GRAPHS = 4  # measured validation graphs


def lines(config: Config, scratch: Path) -> Iterator[str]:
  """Yields the lines of a dry run, each as soon as it is known.

  Args:
    config: of the run, with `data_root`; the folder may be missing.
    scratch: an empty folder for files of the measurement.

  Raises:
    ValueError: the config cannot work, or a file of the data is malformed.
  """
  ranker, collections, is_ready = Ranker(config), data_of(config), True
  for data in collections:
    is_ready &= yield from _collection_lines(config, data.collection, scratch)
  if is_ready:
    yield from _time_lines(ranker, collections, scratch)


def _collection_lines(
  config: Config, collection: Collection, scratch: Path
) -> Generator[str, None, bool]:
  """Yields the sizes of a collection; returns whether a run can be measured on it."""
  name = collection.name
  yield f"collection  {name}"
  splits = [split for split in SPLITS if npz.files_there(config.data_root, name, split)]
  yield from _data_lines(config, collection, splits)
  labelled = {"train", "valid"} & set(splits)
  if len(labelled) < (1 if config.data.folds else 2):
    only = f"only {', '.join(splits)}" if splits else "no data"
    needs = "which needs the splits train and valid"
    yield f"time        not measured, {needs}: {only} at {config.data_root}"
    return False
  if isinstance(config.data, LayoutDataOptions):
    is_incomplete, text = _store_line(config, collection, splits, scratch)
    yield text
    if is_incomplete:
      build = f"python -m tpugraphs_jax.data.store build --data_root {config.data_root}"
      yield f"time        not measured: build the store first ({build} --collection {name})"
      return False
  folder = Path(*name.split(":"))
  folders = f"{config.data_root}/{folder}"
  if isinstance(config.data, LayoutDataOptions):
    folders += f" and {config.data.store_dir or f'{config.data_root}/store'}/{folder}"
  yield f"hosts       each reads {folders}; process 0 alone reads and writes --workdir"
  return True


def _data_lines(config: Config, collection: Collection, splits: Sequence[str]) -> Iterator[str]:
  by_split = [npz.files_there(config.data_root, collection.name, split) for split in splits]
  size = sum(path.stat().st_size for paths in by_split for path in paths)
  if splits:
    yield f"files       {console.size(size)} in {config.data_root} ({', '.join(splits)})"
  if not splits and collection.is_released:
    published = download.PUBLISHED[collection.name]
    size = console.size(1e9 * published.gigabytes)
    yield (
      f"download    about {size}, twice that while it is unpacked: python -m "
      f"tpugraphs_jax.data.download --data_root {config.data_root} --collections {collection.name}"
    )
    if collection.kind == "layout":
      yield f"store       at most about {console.size(1e9 * published.store_gigabytes)}"
  place = files.local_of(config.data_root).absolute()
  while not place.exists():
    place = place.parent
  yield f"disk        {console.size(shutil.disk_usage(place).free)} free at {place}"


def _number(count: int, noun: str) -> str:
  """A count with its noun: `1 device`, `2 devices`."""
  return f"{count:,} {noun}{'s' * (count != 1)}"


def _store_line(
  config: Config, collection: Collection, splits: Sequence[str], scratch: Path
) -> tuple[bool, str]:
  """Whether the store has to be built before a measurement, and a line with its size."""
  assert isinstance(config.data, LayoutDataOptions)
  size, absent, bound, store_dir = 0, 0, 0, config.data.store_dir or None
  for split in splits:
    folders = store.graph_folders(config.data_root, collection.name, split, store_dir=store_dir)
    for file, folder in folders.items():
      if not graph_folder.why_outdated(folder, file):
        size += sum(path.stat().st_size for path in folder.iterdir())
      else:
        absent, bound = absent + 1, bound + _store_bytes(file)
  text = f"store       {console.size(size)}"
  if absent:
    graphs = _number(absent, "graph")
    text += f", and at most about {console.size(bound)} for {graphs} not yet in it"
  is_synthetic = Path(config.data_root).is_relative_to(scratch)
  return bool(absent) and not is_synthetic, text


def _store_bytes(file: Path) -> int:
  """About the most bytes that a graph takes in the store.

  A configuration takes a byte per group of nodes, or two bytes where the graph has more than 256
  distinct rows. The estimate is a byte per configurable node; a graph has at most as many groups.
  """
  with npz.NpzArchive(file) as archive:
    configs, config_nodes, _ = archive.member("node_config_feat").shape
    (nodes,) = archive.member("node_opcode").shape
    edges, _ = archive.member("edge_index").shape
  return configs * (config_nodes + 8) + nodes * (4 * NODE_FEATURES + 1) + 8 * edges


def _time_lines(ranker: Ranker, collections: Sequence[Data], scratch: Path) -> Iterator[str]:
  """Takes a few steps and scores a few graphs; yields time and memory of the run."""
  config, (first, *others) = ranker.config, collections
  training.check_machine(config)
  graphs, valid = load_graphs(ranker, collections, scratch, resume=False)
  phase = ranker.family.first_phase(graphs, scratch)
  plan = training.plan_batches(phase, first.targets)
  begun = training.begin(phase, plan)
  steps, epochs = begun.timetable.total_steps, begun.timetable.epochs
  params, compilation, measured = _steps(begun, plan)
  scoring = _scoring(ranker, first, params, valid)
  also = []
  for data in others:
    loaded = evaluable(data.load("valid"))
    also.append(_scoring(ranker, data, params, [ranker.prepare(graph) for graph in loaded]))
  yield from _memory_lines(begun.state)
  step, shapes = float(np.mean(measured)), len(plan.budgets)
  compiled = f"{_number(shapes, 'batch shape')} of training, {compilation:.1f} s each"
  yield f"compiles    {compiled}; a shared compilation cache saves this in later runs"
  evaluations = -(-epochs // config.train.eval_every_epochs)
  _, last, ranking, ranked = map(sum, zip(scoring, *also))
  mean = f"{step:.3g} s (mean of {len(measured)} measured)"
  judged = f"{_number(evaluations, 'evaluation')} of {scoring.sample:.3g} s"
  yield f"steps       {steps:,} of {mean}, {judged}, the last one of {last:.3g} s"
  test = f"{_number(ranked, 'configuration')} of the test split in {ranking:.3g} s"
  yield f"ranking     {test if ranked else 'not counted: there is no test split'}"
  total = steps * step + shapes * compilation + evaluations * scoring.sample
  devices = _number(jax.device_count(), "device")
  yield f"time        about {console.duration(total + last + ranking)} on {devices} like these"
  if config.segments and config.segments.finetune.epochs:
    yield "            without the fine-tuning of the head, which was not measured"


def _steps(begun: Training, plan: BatchPlan) -> tuple[optax.Params, float, list[float]]:
  """Parameters, seconds to compile a batch shape, and seconds of each measured step."""
  state, shapes = parallel.replicate(begun.state), set()
  first: list[float] = []  # steps of a new shape, which compile
  later: list[float] = []
  for step in range(begun.timetable.total_steps):
    shape = tuple(plan.budget(step).values())
    since = time.monotonic()
    state, metrics = begun.train_step(state, next(begun.batches))
    jax.block_until_ready(metrics)
    (later if shape in shapes else first).append(time.monotonic() - since)
    shapes.add(shape)
    if len(later) == _STEPS or sum(later) > _SECONDS:
      break
  compilation = max(0.0, float(np.mean(first) - np.mean(later or first)))
  return parallel.unreplicate(state.eval_params), compilation, later or first


class _Scoring(NamedTuple):
  """Seconds of scoring a collection, estimated from a few graphs."""

  sample: float  # of an evaluation during training
  evaluation: float  # of the evaluation after training
  ranking: float  # of the test split
  ranked: int  # configurations of the test split


def _scoring(ranker: Ranker, data: Data, params: optax.Params, valid: list[Any]) -> _Scoring:
  config = ranker.config
  sample = training.sample_graphs(config, valid)
  ids = training.sample_ids(config, sample, 0)
  by_size = sorted(range(len(sample)), key=lambda i: len(sample[i].opcode))
  evenly = np.linspace(0, len(by_size) - 1, _GRAPHS).round().astype(int)
  numbers = sorted({by_size[i] for i in evenly})
  few = [sample[i] for i in numbers], [ids[i] for i in numbers]
  ranker.family.scores(params, *few)  # compiles
  since = time.monotonic()
  ranker.family.scores(params, *few)
  rate = (time.monotonic() - since) / _work(*few)
  final_ids = [data.validation_ids(graph.name, graph.configs) for graph in valid]
  has_test = npz.files_there(config.data_root, data.collection.name, "test")
  test = [ranker.prepare(g) for g in data.load("test")] if has_test else []
  test_ids = [np.arange(len(graph.configs)) for graph in test]
  return _Scoring(
    rate * _work(sample, ids),
    rate * _work(valid, final_ids),
    rate * _work(test, test_ids),
    sum(map(len, test_ids)),
  )


def _memory_lines(state: TrainState) -> Iterator[str]:
  memory, peak_bytes = log.peak_memory()
  peak, parameters = console.size(peak_bytes), optax.tree.size(state.params)
  yield f"memory      {peak} of the {memory} at its peak, {parameters:,} parameters"
  size = console.size(2 * sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
  yield f"checkpoints about {size}: two, each with parameters and state of the optimizer"


def _work(graphs: Sequence[Any], ids: Sequence[np.ndarray]) -> int:
  """Sum over graphs of nodes times configurations."""
  return sum(len(graph.opcode) * len(graph_ids) for graph, graph_ids in zip(graphs, ids))
