"""What a working folder holds of a run."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from flax import traverse_util
import numpy as np

from tpugraphs_jax import metrics, remote
from tpugraphs_jax.data import synthetic
from tpugraphs_jax.serve import judge

_KS = (1, 2, 5, 10, 20, 50, 100)


@dataclasses.dataclass(frozen=True)
class Judged:
  """Scores of a validation graph beside its measurements.

  Attributes:
    name: of the graph.
    nodes: of the graph.
    scores: `[n]` float32, larger = slower.
    runtime_ns: `[n]` int64.
    ceiling_ns: `[n]` int64, without noise; None where it is not known.
  """

  name: str
  nodes: int
  scores: np.ndarray
  runtime_ns: np.ndarray
  ceiling_ns: np.ndarray | None = None

  @property
  def kendall_tau(self) -> float:
    return metrics.kendall_tau(self.scores, self.runtime_ns)

  @property
  def slowdowns(self) -> dict[int, float]:
    """Top-k slowdown by k, for k up to the number of configurations."""
    ks = [k for k in _KS if k <= len(self.scores)] or [1]
    return metrics.top_k_slowdown(self.scores, self.runtime_ns, ks)

  @property
  def ranks(self) -> tuple[np.ndarray, np.ndarray]:
    """Predicted rank and rank by label of every configuration, `[n]` each, 0 = fastest."""
    place = lambda values: np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return place(self.scores), place(self.runtime_ns)


@dataclasses.dataclass(frozen=True)
class Run:
  """One run.

  Attributes:
    name: its folder, as short as tells it apart.
    config: flat, by field (`batch.graphs`), without the seed.
    seed: of the run.
    summary: `summary.json`; empty if there is none.
    rows: lines of `metrics.jsonl`.
    judged: validation graphs; empty before evaluation.
  """

  name: str
  config: dict[str, Any]
  seed: int
  summary: dict[str, Any]
  rows: list[dict[str, Any]]
  judged: tuple[Judged, ...]

  @property
  def labels(self) -> str:
    """The kind of the labels, see `collections.label_kind`."""
    return self.summary.get("labels", "of unknown kind")

  @property
  def means(self) -> dict[str, float]:
    """Metrics of the final evaluation by name; those without a number are left out."""
    found = self.summary.get("validation", {}).get("metrics", {})
    return {name: value for name, value in found.items() if value is not None}


def read_all(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
  """The runs of working folders, with as much of each path as tells them apart.

  Raises:
    FileNotFoundError, ValueError: as `read`.
  """
  paths = [Path(os.fspath(folder).replace("://", "/") if remote.is_remote(folder)
                else Path(folder).expanduser().absolute()) for folder in folders]
  depth = 1
  while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
    depth += 1
  return [dataclasses.replace(read(remote.fetch(folder)), name="/".join(path.parts[-depth:]))
          for folder, path in zip(folders, paths)]


def read(folder: Path) -> Run:
  """The run of a working folder.

  Raises:
    FileNotFoundError: no run was started there.
    ValueError: its config.json is damaged.
  """
  path = folder / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{path} is missing: name a folder that a model was trained in")
  try:
    config = traverse_util.flatten_dict(
        dict(json.loads(path.read_text(encoding="utf-8"))["config"]), sep=".")
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} is damaged ({error})") from None
  seed = config.pop("seed", 0)
  data_root, found = config.pop("data_root", ""), _summary(folder / "summary.json")
  return Run(folder.name or str(folder), config, seed, found, _rows(folder / "metrics.jsonl"),
             _judged(folder / judge.SCORES_FILE, data_root, found.get("collection", "")))


def _summary(path: Path) -> dict[str, Any]:
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _rows(path: Path) -> list[dict[str, Any]]:
  """Whole lines: the last one may be cut short while a run goes on."""
  rows = []
  for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
    try:
      rows.append(json.loads(line))
    except ValueError:
      continue
  return rows


def _judged(path: Path, data_root: str, collection: str) -> tuple[Judged, ...]:
  if not path.exists():
    return ()
  with np.load(path, allow_pickle=False) as file:
    ends = np.cumsum(file["sizes"])[:-1]
    parts = [np.split(file[name], ends) for name in ("config_ids", "scores", "runtime_ns")]
    return tuple(
        Judged(str(name), int(nodes), scores, runtime_ns,
               _ceiling(data_root, collection, str(name), ids, runtime_ns))
        for name, nodes, ids, scores, runtime_ns in zip(file["graphs"], file["nodes"], *parts))


def _ceiling(
    data_root: str, collection: str, name: str, ids: np.ndarray, runtime_ns: np.ndarray
) -> np.ndarray | None:
  """Runtimes without noise, `[n]` int64, of synthetic data that are still there and the same."""
  if not collection or remote.is_remote(data_root):
    return None
  try:
    found = synthetic.read_ceiling(data_root, collection, "valid", name)
    is_same = np.array_equal(found.measured_ns[ids], runtime_ns)
  except (OSError, ValueError, IndexError):
    return None
  return found.runtime_ns[ids] if is_same else None
