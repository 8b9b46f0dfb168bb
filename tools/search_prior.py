"""Learns the prior of the effects of changes, with which `tune` searches.

    python -m tools.search_prior
    python -m tools.search_prior --model layout-cpu-measured --collections programs_cpu

Reads labelled programs of `data/own`, the training and validation families, and writes
`NAME.prior.json` beside the model NAME that ships and whose scores are the predicted costs. The
weights are those of the largest posterior density: the likelihood of the labels of every
program, which is normal, and a normal prior of the weights that draws them to zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from tools import ship
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra.files import replacing
from tpugraphs_jax.rankers import explain, model_file
from tpugraphs_jax.rankers.ranker import load
from tpugraphs_jax.tuning import prior, strategies
from tpugraphs_jax.tuning.prior import Prior

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data" / "own" / "npz" / "layout" / "own"
LEARNT = ("train", "valid")  # splits
# Standard deviations of weights: of the mean of all effects, of its other weights and of the
# weight of the cost; of the logarithm of the spread of all effects, its others, of the cost.
_MEAN, _SPREAD = (0.05, 0.02, 1.0), (3.0, 0.7, 2.0)
UNIT_OF = "layout-v3-estimate"  # its costs are in units of 1
_USUAL = -3.0  # logarithm of the spread of all effects
_STEPS = 200


def files(
  collections: Sequence[str], splits: Sequence[str], *, data: Path = DATA, target: str = ""
) -> list[Path]:
  """The files of labelled programs in collections of a folder, of a target other than v3."""
  suffix = f"_{target}" if target else ""
  return [
    path
    for collection in collections
    for split in splits
    for path in sorted((data / f"{collection}{suffix}" / split).glob("*.npz"))
  ]


def pool(graph: OpGraph) -> strategies.Pool:
  """The labelled choices of a program; a choice is the dictionary rows of its groups."""
  with_choices = lambda choices: explain.with_rows(graph, np.array(choices))
  return strategies.Pool([tuple(map(int, row)) for row in graph.configs.group_row[:]], with_choices)


def rms_cost(graphs: Sequence[OpGraph], ranker: Any) -> float:
  """The root mean square of the predicted costs of single changes."""
  return float(
    np.sqrt(
      np.mean(np.concatenate([strategies.costs(pool(graph), ranker)[1] for graph in graphs]) ** 2)
    )
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
  """The labels of P programs, padded: C choices, T changes, F features."""

  feat: np.ndarray  # [P, T, F]
  is_alike: np.ndarray  # [P, T, T] whether two changes are of one kind
  changes: np.ndarray  # [P, C, T] which changes a choice has
  effect: np.ndarray  # [P, C] logarithm of the label over that of the compiler's own choice
  is_there: np.ndarray  # [P, C]

  @classmethod
  def of(cls, graphs: Sequence[OpGraph], ranker: Any, unit: float) -> Examples:
    programs = []
    for graph in graphs:
      choices = pool(graph)
      at, cost = strategies.costs(choices, ranker)
      feat, kind = prior.change_features(*at, cost / unit)
      label = graph.configs.labels[:]
      programs.append(
        (
          feat,
          kind[:, None] == kind,
          choices.rows(choices.choices),
          np.minimum(np.log(label / label[0]), prior.LARGEST_EFFECT),
          np.ones(len(label)),
        )
      )
    return cls(*map(_padded, zip(*programs)))


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
  shape = np.max([array.shape for array in arrays], axis=0)
  return np.stack(
    [
      np.pad(array.astype(np.float64), [(0, most - size) for most, size in zip(shape, array.shape)])
      for array in arrays
    ]
  )


def learn(graphs: Sequence[OpGraph], ranker: Any, unit: float, about: dict[str, Any]) -> Prior:
  """The prior with the largest posterior density, given the labels of programs."""
  graphs = [graph for graph in graphs if graph.configs.differ]
  examples = Examples.of(graphs, ranker, unit)
  count = examples.feat.shape[-1]
  weight = lambda first, others, last: np.array([first, *[others] * (count - 2), last])
  usual = np.array([_USUAL, *[0.0] * (count - 1)])

  def loss(values: jax.Array) -> jax.Array:
    mean, log_spread = values[:count], values[count : 2 * count]
    correlation, noise = jax.nn.sigmoid(values[-2]), jnp.exp(values[-1])
    penalty = ((mean / weight(*_MEAN)) ** 2).sum() + (
      ((log_spread - usual) / weight(*_SPREAD)) ** 2
    ).sum()
    return _surprise(examples, mean, log_spread, correlation, noise) + penalty / 2

  with jax.enable_x64(True):
    gradient = jax.jit(jax.value_and_grad(loss))
    fitted = optimize.minimize(
      lambda values: tuple(np.asarray(part, np.float64) for part in gradient(values)),
      np.concatenate([np.zeros(count), usual, [-1.0, -4.0]]),
      jac=True,
      method="L-BFGS-B",
      options={"maxiter": _STEPS},
    )
  return Prior(
    fitted.x[:count],
    fitted.x[count : 2 * count],
    round(float(1 / (1 + np.exp(-fitted.x[-2]))), 4),
    round(float(np.exp(fitted.x[-1])), 4),
    unit,
    about,
  )


def _surprise(examples: Examples, mean, log_spread, correlation, noise) -> jax.Array:
  """Minus the log likelihood of the labels of all programs, without a constant."""
  spread = jnp.exp(jnp.clip(examples.feat @ log_spread, -8, 1))
  alike = correlation * examples.is_alike + (1 - correlation) * jnp.eye(spread.shape[1])
  covariance = spread[:, :, None] * spread[:, None] * alike
  given, there = examples.changes, examples.is_there
  labels = given @ covariance @ given.swapaxes(1, 2)
  labels = (
    labels * there[:, :, None] * there[:, None]
    + jnp.eye(labels.shape[1]) * jnp.where(there > 0, noise**2, 1.0)[:, :, None]
  )
  left = (examples.effect - jnp.einsum("pct,pt->pc", given, examples.feat @ mean)) * there
  root = jnp.linalg.cholesky(labels)
  white = jax.scipy.linalg.solve_triangular(root, left[..., None], lower=True)
  return (white**2).sum() / 2 + jnp.log(jnp.diagonal(root, axis1=1, axis2=2)).sum()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="layout-v3-estimate", help="name of a model that ships")
  parser.add_argument("--collections", nargs="+", default=["outputs", "blocks"])
  args = parser.parse_args()
  ranker = load(args.model)
  paths = files(args.collections, LEARNT)
  graphs = list(map(npz.read_layout, paths))
  about = {
    "model": args.model,
    "collections": args.collections,
    "programs": len(graphs),
    "families": sorted(set(map(ship.family, paths))),
    "labels": ship.facts(paths),
  }
  unit = 1.0
  if args.model != UNIT_OF:
    unit = rms_cost(graphs, ranker) / prior.read(_file(UNIT_OF)).about["rms_cost"]
  about["rms_cost"] = rms_cost(graphs, ranker)
  write(_file(args.model), learn(graphs, ranker, unit, about))
  print(f"{len(graphs)} programs -> {_file(args.model)}")


def write(path: Path, prior: Prior) -> None:
  """Writes a prior as JSON, a line for each field."""
  record = dataclasses.asdict(prior) | {
    "mean": prior.mean.round(5).tolist(),
    "log_spread": prior.log_spread.round(4).tolist(),
  }
  lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
  with replacing(path) as file:
    file.write("{" + ",\n".join(lines) + "}\n")


def _file(name: str) -> Path:
  return model_file.SHIPPED / f"{name}.prior.json"


if __name__ == "__main__":
  main()
