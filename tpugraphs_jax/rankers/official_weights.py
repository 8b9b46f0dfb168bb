"""Weights of the official TensorFlow models, in their order, as Flax parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.rankers.layout import res_model
from tpugraphs_jax.rankers import tile

Path = tuple[str, ...]
_EMBEDDING: list[Path] = [("op_embedding", "table", "embedding")]


def _dense(*modules: Path, bias: bool = True) -> list[Path]:
  kinds = ("kernel", "bias") if bias else ("kernel",)
  return [module + (kind,) for module in modules for kind in kinds]


def _mlp(name: str, layers: int, *, bias: bool = True) -> list[Path]:
  return _dense(*((name, f"Dense_{i}") for i in range(layers)), bias=bias)


def _sage_order(model: tile.SAGE) -> list[Path]:
  rounds = [(f"sage_{i}",) for i in range(model.num_gnns)]
  return _EMBEDDING + _dense(*rounds) + _mlp("head", 3)


def _res_gcn_order(model: tile.ResGCN) -> list[Path]:
  # Keras creates the convolutions before the layers around them.
  suffixes = ("_forward", "_reverse", "_self") if model.directed else ("",)
  convs = [_mlp(f"gcn_{i}{suffix}", 2) for i in range(model.num_gnns) for suffix in suffixes]
  return _EMBEDDING + sum(convs, []) + _dense(("pre_0",), ("pre_1",)) + _mlp("head", 2)


def _mlp_order(model: tile.PooledMLP) -> list[Path]:
  return _EMBEDDING + _mlp("head", model.num_layers + 1)


def _res_model_order(model: res_model.ResModel) -> list[Path]:
  updates = [(f"update_{part}_{i}",) for i in range(model.num_gnns) for part in (0, 1)]
  return _EMBEDDING + _dense(("pre_0",), ("pre_1",), *updates) + _mlp("head", 2, bias=False)


_ORDERS = {
    tile.SAGE: _sage_order,
    tile.ResGCN: _res_gcn_order,
    tile.PooledMLP: _mlp_order,
    res_model.ResModel: _res_model_order,
}


def weight_order(model: Any) -> list[Path]:
  """Parameter paths of `model` in the order of the official model's weights.

  Raises:
    ValueError: for a model the official code does not have.
  """
  if type(model) not in _ORDERS:
    raise ValueError(
        f"{type(model).__name__} is not an official model; there are no weights for it")
  return _ORDERS[type(model)](model)


def params_from_official(model: Any, weights: Sequence[np.ndarray]) -> dict[str, Any]:
  """Flax parameters from official weights.

  Args:
    model: a tile model or a layout `ResModel`.
    weights: arrays of any shape `[...]`, in the order of Keras' `model.weights`.

  Returns:
    The "params" collection, float32.

  Raises:
    ValueError: the model has a different number of weights.
  """
  order = weight_order(model)
  if len(order) != len(weights):
    raise ValueError(f"{len(weights)} weights given, {type(model).__name__} has {len(order)}")
  return traverse_util.unflatten_dict(
      {path: jnp.asarray(weight, jnp.float32) for path, weight in zip(order, weights)})
