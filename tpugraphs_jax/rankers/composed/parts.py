"""A linear layer on node features and configurations, each by its half.

    W [static, config] = W_s static + W_c config

The static half is computed once per graph. The configuration's half is computed once per
row of the dictionary (layouts) or per kernel (tiles), and looked up where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.nn import layout_features, pooling
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.layers import JoinedDense
from tpugraphs_jax.nn.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates

Project = Callable[[Any], jax.Array]


class Part(NamedTuple):
  """Features that depend on the configuration, not yet through their half of a layer.

  Attributes:
    width: number of features.
    through: the features `[..., width]` mapped by a function of single rows; None where
      all of them are zero.
  """

  width: int
  through: Callable[[Project], Nodes] | None


def layout_part(rows: jax.Array, missing: jax.Array | None, slates: Slates) -> Part:
  """Layout configurations of nodes.

  Args:
    rows: `[R, V]` encoded rows of the dictionary.
    missing: `[N, V]` or `[1, V]`, encoded, of nodes that are not configurable; None = zeros.
    slates: of the nodes.
  """
  batch = slates.batch

  def through(project: Project) -> SplitNodes:
    config = layout_features.config_rows(project(rows), batch)
    shape = len(slates.graph_of), config.shape[2]
    other = jnp.zeros(shape) if missing is None else jnp.broadcast_to(project(missing), shape)
    own = take_rows(other, batch.by_hop.nodes[0])[:, None].astype(config.dtype)
    configured = layout_features.is_configured_row(batch)[:, None, None]
    return SplitNodes(
        other[:, None].astype(config.dtype), jnp.where(configured, config, own), 0)

  return Part(rows.shape[1], through)


def tile_part(configs: jax.Array, slates: Slates) -> Part:
  """Tile configurations `[G, C, V]`, encoded, on every node of their kernels."""
  return Part(configs.shape[2],
              lambda project: pooling.per_node(project(configs), slates.graph_of))


def nodes_part(x: Nodes) -> Part:
  """Features of nodes that are there already."""
  rows = x.shared if isinstance(x, SplitNodes) else x
  return Part(rows.shape[-1], lambda project: jax.tree.map(project, x))


def absent(width: int) -> Part:
  """Features that graphs of another kind have: zeros here."""
  return Part(width, None)


class Join(nn.Module):
  """One linear layer on node features and everything that depends on the configuration.

  Attributes:
    features: width of its result.
    matmul: product `[..., K] @ [K, F]` in the dtype of the computation.
    share: whether static features and rows pass their half of the layer once. If not, all
      nodes carry all inputs of all configurations to the layer, `[N, C, F]`.
  """

  features: int
  matmul: Callable[[jax.Array, jax.Array], jax.Array]
  share: bool = True

  @nn.compact
  def __call__(self, static: jax.Array, parts: Sequence[Part], slates: Slates) -> Nodes:
    """Joins `static [N, F]` with the parts: `[N, C, features]` in either form.

    Without parts there is one configuration, which stands for all.
    """
    blocks, bias = JoinedDense(self.features)(
        (static.shape[1], *(part.width for part in parts)))
    blocks = [blocks[0], *(block for part, block in zip(parts, blocks[1:]) if part.through)]
    parts = [part for part in parts if part.through]
    if not self.share:
      shape = len(static), slates.configs, static.shape[1]
      inputs = [jnp.broadcast_to(static[:, None], shape)]
      inputs += [nodes.everywhere(part.through(lambda rows: rows), slates) for part in parts]
      product = self.matmul(jnp.concatenate(inputs, axis=-1), jnp.concatenate(blocks))
      return product + bias[None].astype(product.dtype)
    base = self.matmul(static, blocks[0])
    base += bias.astype(base.dtype)
    if not parts:
      return base[:, None]
    config = nodes.add(slates, *(
        part.through(lambda rows, kernel=kernel: self.matmul(rows, kernel))
        for part, kernel in zip(parts, blocks[1:])))
    return nodes.add(slates, config, nodes.spread(base, config, slates))
