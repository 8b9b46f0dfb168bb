"""A trained model as a ranker: from a working folder and a graph to an order."""

from __future__ import annotations

from collections.abc import Sequence
import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from tpugraphs_jax.data.batching import PreparedGraph
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.tasks import checks
from tpugraphs_jax.tasks.layout import LayoutTask
from tpugraphs_jax.tasks.segments import SegmentTask
from tpugraphs_jax.tasks.task import Task
from tpugraphs_jax.tasks.tile import TileTask
from tpugraphs_jax.train import checkpoint, loop, state as state_lib

TASKS = {"tile": TileTask, "layout": LayoutTask, "segments": SegmentTask}
TRANSFORMS_FILE = "features.json"
# What may differ between the run that trained a model and one that uses it.
_FREE_FIELDS = ("eval", "train", "profile_steps", "data_root")
_FREE_DATA_FIELDS = (
    "skip_bad_files", "store_dir", "extra_dir", "loader_threads", "neighbour_slots")
# Fields that tell the configs of the tasks apart.
_TASK_FIELDS = {"tile": (), "layout": ("data.search",), "segments": ("data.search", "segments")}


def create_task(config: ml_collections.ConfigDict) -> Task:
  """The task that `config.task` names.

  Raises:
    ValueError: no task has that name, or the config is one of another task.
  """
  checks.one_of(config, {"task": tuple(TASKS)})
  for field in _TASK_FIELDS[config.task]:
    section, _, name = field.rpartition(".")
    if name not in (config[section] if section else config):
      raise ValueError(f"--config.task is {config.task}, but the config has no {field}: name a "
                       "file and variant of that task in --config")
  return TASKS[config.task](config)


def fingerprint(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The fields that a checkpoint must agree with to be used."""
  fields = {k: v for k, v in config.to_dict().items() if k not in _FREE_FIELDS}
  fields["data"] = {k: v for k, v in fields["data"].items() if k not in _FREE_DATA_FIELDS}
  return fields


def saved_config(workdir: str | os.PathLike[str]) -> ml_collections.ConfigDict:
  """The config that the model in `workdir` was trained with.

  Raises:
    FileNotFoundError: nothing was trained there.
    ValueError: its config.json is damaged.
  """
  path = Path(workdir).expanduser() / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: --workdir must name a folder that a model was "
                            "trained in")
  try:
    return ml_collections.ConfigDict(_with_tuples(json.loads(path.read_text())["config"]))
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}); train again") from None


def _with_tuples(value: Any) -> Any:
  """Undoes what JSON does to tuples: models and overrides want them."""
  if isinstance(value, dict):
    return {key: _with_tuples(part) for key, part in value.items()}
  return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


class Ranker:
  """The best model of a working folder.

  Args:
    workdir: folder that `run_tile.py` or `run_layout.py` trained in.
    config: overrides the saved config (fields that the model depends on must agree).
  """

  def __init__(
      self, workdir: str | os.PathLike[str], config: ml_collections.ConfigDict | None = None
  ):
    self.workdir = Path(workdir).expanduser()
    self.task = create_task(config or saved_config(self.workdir))
    self.task.load_transforms(self.workdir / TRANSFORMS_FILE)
    self.scorer = self.task.scorer()
    self._params = None

  def params(self, example: PreparedGraph) -> Any:
    """The best parameters; the example graph gives the shapes to expect."""
    if self._params is None:
      template = _state_template(self.task, example)
      folder = self.workdir / self.task.final_folder / loop.CHECKPOINTS
      checkpoints = checkpoint.Checkpoints(
          folder, config=fingerprint(self.task.config), read_only=True)
      saved = checkpoints.best(template) or checkpoints.newest(template)
      checkpoints.close()
      if saved is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint: train first")
      self._params = saved.state.eval_params
    return self._params

  def scores(self, graphs: Sequence[OpGraph], *, progress: bool = False) -> list[np.ndarray]:
    """Scores of all configurations of each graph, `[C]` float32, larger = slower."""
    prepared = [self.task.prepare(graph) for graph in graphs]
    ids = [np.arange(len(graph.configs)) for graph in graphs]
    return self.task.score(
        self.scorer, self.params(prepared[0]), prepared, ids, progress=progress)

  def rank(self, graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Order and scores of one graph; see `rank`."""
    (scores,) = self.scores([graph])
    return np.argsort(scores, kind="stable"), scores


def _state_template(task: Task, example: PreparedGraph) -> state_lib.TrainState:
  """Zeros in the shapes of a training state."""
  batch = task.example_batch(example)
  create = functools.partial(state_lib.TrainState.create, optimizer=task.final_optimizer())
  init = lambda: create(task.model.init(jax.random.key(0), batch)["params"])
  return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(init))


@functools.lru_cache(maxsize=4)
def _ranker(workdir: Path, saved_ns: int) -> Ranker:
  del saved_ns  # a newer checkpoint needs another ranker
  return Ranker(workdir)


def rank(workdir: str | os.PathLike[str], graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
  """Ranks the configurations of a graph with the model trained in `workdir`.

  Args:
    workdir: folder that `run_tile.py` or `run_layout.py` trained in.
    graph: an `OpGraph` with `configs`, from a file or from `tpugraphs_jax.hlo`.

  Returns:
    Configuration numbers from fastest to slowest, `[C]` int64, and the score of
    each configuration, `[C]` float32, larger = slower.

  Raises:
    FileNotFoundError: no trained model there.
    ValueError: the graph has no configurations of the model's kind.
  """
  folder = Path(workdir).expanduser().absolute()
  # Of the last phase too, whatever its folder is called.
  saved = (*folder.glob(loop.CHECKPOINTS), *folder.glob(f"*/{loop.CHECKPOINTS}"))
  ranker = _ranker(folder, max((path.stat().st_mtime_ns for path in saved), default=0))
  ranker.task.check_configs(graph)
  return ranker.rank(graph)
