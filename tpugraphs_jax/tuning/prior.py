"""What a change of layouts may do to a program, before any choice of it is labelled.

A change gives one group one other option. Its effect is the difference that it makes to the
logarithm of the label. The prior of the effects of a program is normal. Mean and standard deviation
of an effect depend on the kind of the change and on the cost that a model predicts for it. A kind
is an operation and a class of `ORDERS`. Effects of one kind in one program are correlated.
`tools/search_prior.py` learns the numbers from labelled programs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tpugraphs_jax.columns import NODE, opcode_ids
from tpugraphs_jax.data import features
from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import trust
from tpugraphs_jax.rankers.tables import traffic

OPERATIONS = ("convolution", "weight gradient", "dot", "batched dot", "reshape")
# Classes of new orders of an output. `own`: the order is the compiler's own. `users differ`: a user
# of the same shape has another order. `no such user`: no user has the shape of the output.
ORDERS = ("own", "own, users differ", "other", "other, no such user")
COSTS = (0.003, 0.02, 0.1)  # between the four classes of predicted costs
_LARGEST_COST = 0.3
LARGEST_EFFECT = 0.1  # larger effects count as this in a search
_LOG_SPREAD = -8.0, 1.0  # range of logarithms of standard deviations


@dataclasses.dataclass(frozen=True, eq=False)
class Prior:
  """The prior of effects; F features, in the order of `features`.

  Attributes:
    mean: `[F]` weights of the mean of an effect.
    log_spread: `[F]` weights of the logarithm of its standard deviation.
    correlation: of two effects of one kind in one program.
    noise: standard deviation of log labels around the sum of their effects.
    unit: the predicted cost that counts as 1.
    about: source of the numbers. `model` predicted the costs, and `rms_cost` is the root mean
      square of these costs.
  """

  mean: np.ndarray
  log_spread: np.ndarray
  correlation: float
  noise: float
  unit: float
  about: dict[str, Any]

  def unit_of(self, model: str | None, cost: np.ndarray) -> float:
    """The unit of costs `[T]` that a model predicts.

    Scores of a model other than the prior's are no costs, and only their order means something:
    they are brought to the root mean square of the costs that the prior knows.
    """
    rms = float(np.sqrt(np.mean(np.square(cost)))) if len(cost) else 0.0
    if model == self.about["model"] or not rms:
      return self.unit
    return self.unit * rms / self.about["rms_cost"]

  def effects(self, feat: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means `[T]` and covariance `[T, T]` of effects with these features and kinds."""
    spread = np.exp(np.clip(feat @ self.log_spread, *_LOG_SPREAD))
    alike = self.correlation * (kind[:, None] == kind) + (1 - self.correlation) * np.eye(len(kind))
    return feat @ self.mean, spread[:, None] * spread * alike


def change_features(
  graph: OpGraph, node: np.ndarray, row: np.ndarray, cost: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Features and kinds of changes, the inputs of the prior.

  Args:
    graph: with the compiler's own layouts as node features.
    node: `[T]` a configurable node that each change concerns.
    row: `[T]` the dictionary row that the change gives it.
    cost: `[T]` predicted costs in units of the prior.

  Returns:
    `[T, F]` float64: 1, operation, order, both of them together, class of the cost, and the
    cost, at most .3. And kinds `[T]` int, of operation and order.
  """
  operation, order = _operation(graph)[node], _order(graph, node, row)
  kind = operation * len(ORDERS) + order
  one_hot = lambda number, count: np.eye(count)[number]
  blocks = [
    np.ones((len(node), 1)),
    one_hot(operation, len(OPERATIONS)),
    one_hot(order, len(ORDERS)),
    one_hot(kind, len(OPERATIONS) * len(ORDERS)),
    one_hot(np.searchsorted(COSTS, cost, side="right"), len(COSTS) + 1),
    np.clip(cost, 0, _LARGEST_COST)[:, None],
  ]
  return np.concatenate(blocks, axis=1), kind


def _operation(graph: OpGraph) -> np.ndarray:
  """The place in `OPERATIONS` of each configurable node, `[K]` int."""
  feat = graph.node_feat[graph.config_node]
  opcode, ids = graph.node_opcode[graph.config_node], opcode_ids()
  is_gradient = feat[:, NODE["output_batch_dimension"].start] > 0
  is_batched = (feat[:, features.DIMENSIONS] > 0).sum(axis=1) > 2
  return np.select(
    [opcode == ids["convolution"], opcode == ids["dot"]], [0 + is_gradient, 2 + is_batched], 4
  )


def _order(graph: OpGraph, node: np.ndarray, row: np.ndarray) -> np.ndarray:
  """The place in `ORDERS` of each change, `[T]` int."""
  (consumer, producer), dims = graph.edge_index.T, graph.node_feat[:, features.DIMENSIONS]
  has_shape = (dims[consumer] == dims[producer]).all(axis=1)
  has_such_user = np.isin(graph.config_node[node], producer[has_shape])
  changes_nothing = traffic.changes_nothing(graph, node, row)
  is_own = traffic.is_default_layout(graph, node, row)
  return np.select([changes_nothing, is_own, has_such_user], [0, 1, 2], 3)


def read(path: Path) -> Prior:
  """Reads a prior.

  Raises:
    FileNotFoundError: there is none.
    ValueError: the file is damaged.
  """
  try:
    record = trust.parse(path.read_text())
    mean, log_spread = np.array(record["mean"]), np.array(record["log_spread"])
    others = {name: record[name] for name in ("correlation", "noise", "unit", "about")}
    return Prior(mean, log_spread, **others)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}); install the package again") from None
