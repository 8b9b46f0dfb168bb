"""The 10th place: a transformer over nodes that runs once for all configurations.

    layouts  features and opcode of a node -> blocks
             configurable node and its configuration -> MLP -> mean -> score
    tiles    features and opcode of a node -> blocks
             MLP(tile) -> blocks that attend to the nodes of its kernel -> score

A block has two halves: attention between all nodes of a graph, and messages along edges. Each half
has a layer norm on its input, and a residual connection.

Published: width, number and order of blocks, linear attention and APPNP for XLA, DIFFormer for NLP,
and tiles as queries. Guesses, since there is no public code: heads, steps of propagation, widths of
the MLPs, activations, messages in both directions, APPNP and gates in DIFFormer blocks, and SAGE as
the messages in kernels.

Source: the write-up of the competition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.config_fields import MOST_LAYERS, option
from tpugraphs_jax.data.batching import LayoutBatch, TileBatch
from tpugraphs_jax.nn import attention, layers, pooling
from tpugraphs_jax.nn.aggregation import OPERANDS, USERS
from tpugraphs_jax.nn.attention import KernelAttention, NodeAttention, TransformerLayer
from tpugraphs_jax.nn.conv import Appnp, Sage
from tpugraphs_jax.nn.embeddings import Opcodes
from tpugraphs_jax.nn.layers import Layouts
from tpugraphs_jax.nn.nodes import combine, Nodes, Slates
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.systems.system import System

EPSILON = 1e-6  # epsilon of layer norms
_HEADS = 4  # of each attention; not published
KERNELS = {"linear": attention.positive, "difformer": attention.unit_and_one}


class KaggleTenth(System):
  """Parts that the networks of layouts and tiles share."""

  sees_whole_graph = True

  def __post_init__(self):
    super().__post_init__()
    for width in self.attention_widths:
      if width % _HEADS:
        raise ValueError(f"the attention has width {width}, expected a multiple of {_HEADS}")

  @property
  def attention_widths(self) -> tuple[int, ...]:
    """Widths that the heads divide among themselves."""
    return (self.width,)

  def encode(self, slates: Slates) -> Nodes:
    """Nodes after all blocks, `[N, C, width]`; to be called by a compact method."""
    graph = slates.batch.graph
    opcode = Opcodes(self.op_embed_dim, name="opcodes")(graph)
    x = slates.nodes(jnp.asarray(graph.nodes["feat"]), opcode)
    x = self.linear(self.width, name="first")(x)
    x = self.norm("first_norm")(x).map(nn.gelu)
    for number in range(self.blocks):
      x = self.block(x, number)
    return x

  def norm(self, name: str) -> Callable[[Nodes], Nodes]:
    """A layer norm on nodes."""
    norm = nn.LayerNorm(epsilon=EPSILON, dtype=self.dtype, name=name)
    return lambda x: x.map(norm)


@base.LAYOUT_MODELS.register("Tenth")
class KaggleTenthLayout(KaggleTenth):
  """The 10th place on layouts."""

  op_embed_dim: int = option(64, "width of the opcode vector", least=1)
  width: int = option(256, "width of nodes", least=1)
  blocks: int = option(12, "number of blocks", least=1, most=MOST_LAYERS)
  attention: str = option("linear", "kernel of the attention", one_of=tuple(KERNELS))
  steps: int = option(4, "number of steps of propagation in a block", least=1, most=MOST_LAYERS)
  gated: bool = option(False, "residual connections are learned gates instead of sums")
  mlp_widths: Sequence[int] = option(
    (256, 256), "widths of the layers on configurable nodes with their configurations"
  )

  @nn.compact
  def embed(self, batch: LayoutBatch, *, train: bool = False) -> jax.Array:
    """The mean over configurable nodes with their configurations, `[G, C, P]` float32."""
    del train  # no dropout
    slates = Slates.of(batch)
    x = self.encode(slates)
    inputs: tuple[Nodes | Layouts, ...] = x, Layouts(slates, jnp.asarray(batch.rows))
    for number, width in enumerate(self.mlp_widths):
      x = self.linear(width, name=f"mlp_{number}")(*inputs).map(nn.gelu)
      inputs = (x,)
    return pooling.mean(x, configurable=True)

  def block(self, x: Nodes, number: int) -> Nodes:
    """A block on nodes `x`, `[N, C, width]`."""
    attend = KernelAttention(
      self.width, KERNELS[self.attention], _HEADS, linear=self.linear, name=f"attention_{number}"
    )
    x = self.join(x, attend(self.norm(f"attention_norm_{number}")(x)), f"attention_gate_{number}")
    y = self.norm(f"messages_norm_{number}")(x)
    appnp = lambda direction: Appnp(
      self.width, direction, self.steps, linear=self.linear, name=f"{direction}_{number}"
    )
    y = appnp(OPERANDS)(y) + appnp(USERS)(y)
    return self.join(x, y.map(nn.gelu), f"messages_gate_{number}")

  def join(self, x: Nodes, y: Nodes, name: str) -> Nodes:
    """`x + y`, or with gates `g y + (1 - g) x`, where `g = sigmoid(W [x, y] + b)` per channel."""
    if not self.gated:
      return x + y
    gate = self.linear(self.width, name=name)(x, y).map(nn.sigmoid)
    return combine(lambda g, old, new: g * new + (1 - g) * old, gate, x, y)


@base.TILE_MODELS.register("Tenth")
class KaggleTenthTile(KaggleTenth):
  """The 10th place on tiles."""

  op_embed_dim: int = option(64, "width of the opcode vector", least=1)
  width: int = option(128, "width of nodes", least=1)
  blocks: int = option(8, "number of blocks on nodes", least=1, most=MOST_LAYERS)
  attention_blocks: int = option(
    2, "number of last blocks with attention between nodes", least=1, most=MOST_LAYERS
  )
  mlp_widths: Sequence[int] = option((128, 128), "widths of the layers on tiles")
  cross_blocks: int = option(
    4, "number of blocks in which tiles attend to nodes", least=1, most=MOST_LAYERS
  )

  @property
  def attention_widths(self) -> tuple[int, ...]:
    return (self.width, *self.mlp_widths[-1:])

  @nn.compact
  def embed(self, batch: TileBatch, *, train: bool = False) -> jax.Array:
    """Tiles after attention to the nodes of their kernels, `[G, C, P]` float32."""
    del train  # no dropout
    slates = Slates.of(batch)
    x = self.encode(slates)
    tile = jnp.asarray(batch.config_feat)
    for number, width in enumerate(self.mlp_widths):
      tile = tile if not number else layers.leaky_relu(tile)
      tile = self.exact(width, name=f"mlp_{number}")(tile)
    # One sequence: the tiles of all kernels are queries, all nodes are keys.
    same_kernel = slates.graph_of[None] == jnp.arange(slates.graphs)[:, None]
    mask = jnp.repeat(same_kernel, slates.configs, axis=0)[None, None]
    queries, nodes = tile.reshape(1, -1, tile.shape[-1]), jnp.swapaxes(x.everywhere(), 0, 1)
    for number in range(self.cross_blocks):
      attend = TransformerLayer(
        tile.shape[-1], _HEADS, linear=self.exact, epsilon=EPSILON, name=f"cross_{number}"
      )
      queries = attend(queries, nodes, mask)
    return queries.reshape(tile.shape)

  def block(self, x: Nodes, number: int) -> Nodes:
    """A block on nodes `x`, `[N, 1, width]`."""
    if number >= self.blocks - self.attention_blocks:
      attend = NodeAttention(self.width, _HEADS, self.linear, name=f"attention_{number}")
      x = x + attend(self.norm(f"attention_norm_{number}")(x))
    y = self.norm(f"messages_norm_{number}")(x)
    y = Sage(self.width, (OPERANDS, USERS), self.linear, name=f"messages_{number}")(y)
    return x + y.map(nn.gelu)
