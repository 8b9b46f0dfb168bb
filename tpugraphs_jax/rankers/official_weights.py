"""Converts weights of the official TensorFlow models to Flax parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax.numpy as jnp
import numpy as np

from tpugraphs_jax.rankers import tile
from tpugraphs_jax.rankers.layout import res_model

ParamPath = tuple[str, ...]


def _dense(*modules: ParamPath, bias: bool = True) -> list[ParamPath]:
  kinds = ("kernel", "bias") if bias else ("kernel",)
  return [module + (kind,) for module in modules for kind in kinds]


def _mlp(name: str, layers: int, *, bias: bool = True) -> list[ParamPath]:
  return _dense(*((name, f"Dense_{i}") for i in range(layers)), bias=bias)


def weight_order(model: nn.Module) -> list[ParamPath]:
  """Parameter paths of `model` in the order of the official model's weights.

  Raises:
    ValueError: the official code does not have the model.
  """
  match model:
    case tile.TileSAGE():
      order = _dense(*((f"sage_{i}",) for i in range(model.num_gnns))) + _mlp("head", 3)
    case tile.ResGCN():
      # Keras creates the convolutions before the layers around them.
      sides = ("_forward", "_reverse", "_self") if model.directed else ("",)
      rounds = [_mlp(f"gcn_{i}{side}", 2) for i in range(model.num_gnns) for side in sides]
      order = sum(rounds, []) + _dense(("pre_0",), ("pre_1",)) + _mlp("head", 2)
    case tile.PooledMLP():
      order = _mlp("head", model.num_layers + 1)
    case res_model.ResModel():
      updates = [(f"update_{part}_{i}",) for i in range(model.num_gnns) for part in (0, 1)]
      order = _dense(("pre_0",), ("pre_1",), *updates) + _mlp("head", 2, bias=False)
    case _:
      name = type(model).__name__
      raise ValueError(f"{name} is not an official model; there are no weights for it")
  return [("op_embedding", "table", "embedding"), *order]


def params_from_official(model: Any, weights: Sequence[np.ndarray]) -> dict[str, Any]:
  """Flax parameters from official weights.

  Args:
    model: a tile model or a layout `ResModel`.
    weights: arrays of any shape `[...]`, in the order of Keras' `model.weights`.

  Returns:
    The "params" collection, float32.

  Raises:
    ValueError: the official code does not have the model, or it has another number of weights.
  """
  order = weight_order(model)
  if len(order) != len(weights):
    raise ValueError(f"{len(weights)} weights given, {type(model).__name__} has {len(order)}")
  flat = {path: jnp.asarray(weight, jnp.float32) for path, weight in zip(order, weights)}
  return traverse_util.unflatten_dict(flat)
