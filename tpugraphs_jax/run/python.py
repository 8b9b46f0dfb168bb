"""The commands as a function, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from tpugraphs_jax import report
from tpugraphs_jax.infra import console, files
from tpugraphs_jax.rankers import model_file, ranker
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import results, training


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run.

  Attributes:
    workdir: folder of the run.
  """

  workdir: Path

  @property
  def metrics(self) -> Mapping[str, float | None]:
    """Metrics of the validation split, by their names in `summary.json`; None = not finite.

    With `data.folds` they are of the test fold.
    """
    return results.final_evaluation(results.read_summary(self.workdir)).get("metrics", {})

  @functools.cached_property
  def model(self) -> ranker.Ranker:
    """The trained ranker."""
    return ranker.load(self.workdir)

  def report(self) -> Path:
    """Writes `report.html` into the folder; returns its path."""
    path = self.workdir / report.FILE
    report.write([self.workdir], path)
    return path

  def __repr__(self) -> str:
    known = [f"{name} {value:.4f}" for name, value in self.metrics.items() if value is not None]
    return f"<Run {self.workdir}: {', '.join(known) or 'not evaluated'}>"


@console.working("train_model")
def train_model(
  config: str | os.PathLike[str] | Config,
  *,
  data_root: str | os.PathLike[str],
  workdir: str | os.PathLike[str],
  resume: bool = False,
  predict: bool = False,
  **changes: Any,
) -> Run:
  """Trains a ranker and evaluates it, as `run_tile.py` and `run_layout.py` do.

  Args:
    config: such as `tile.py:recommended`, the path of a file, or a config from `load_config`.
    data_root: folder with `tile/` and `layout/`.
    workdir: folder for checkpoints, metrics and results.
    resume: continue the run in `workdir`.
    predict: also rank the test split.
    **changes: fields of the config, with `__` for the dot: `train__epochs=3`.

  Returns:
    The run, with `metrics`, `model` and `report()`.

  Raises:
    ValueError: a field that the config does not have, an impossible value, or a folder that holds a
      run already.
    FileNotFoundError: no data in `data_root`.
  """
  if isinstance(config, (str, os.PathLike)):
    config = configs.load(os.fspath(config))
  config = config.replace(**changes, data_root=str(data_root))
  workdir = files.expanded(workdir)
  if not resume and (workdir / model_file.CONFIG_FILE).exists():
    raise ValueError(
      f"{workdir} holds a run already: go on with resume=True, or give another workdir"
    )
  do = ["train", "evaluate", *["predict"] * predict]
  training.run(config, workdir, do=do, resume=resume)
  return Run(workdir)
