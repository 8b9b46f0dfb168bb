"""Everything in front of the encoder: encodings, the first linear layer, tokens of dimensions.

The first linear layer takes node features and configurations, each by its half:

    W [static, config] = W_s static + W_c config

The static half is computed once per graph. The configuration's half is computed once per
row of the dictionary (layouts) or per kernel (tiles), and looked up where it belongs.

Tensor dimensions can be tokens of a small transformer (5th place, its tile ranker). A
token holds the features of one of the six dimensions of a node: its columns of the feature
block `dimension_tokens`, its places in the layout, its bounds in a tile, and its number.
The published code joins its columns group by group and cuts them into six tokens without
a transposition, so that its tokens mix dimensions. The feature block here is ordered by
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from tpugraphs_jax.columns import LAYOUT_VALUE_RANGE, opcode_ids
from tpugraphs_jax.nn import layers
from tpugraphs_jax.rankers.composed import pooling, split_nodes
from tpugraphs_jax.nn.aggregation import take_rows
from tpugraphs_jax.nn.layers import JoinedDense, OpcodeEmbedding
from tpugraphs_jax.rankers.composed.split_nodes import SplitNodes
from tpugraphs_jax.rankers.composed import nodes
from tpugraphs_jax.rankers.composed.attention import EncoderLayer
from tpugraphs_jax.rankers.composed.encoder import gated_width
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.options import Options

Project = Callable[[Any], jax.Array]
DIMENSIONS = 6
TOKEN_FEATURES = 23  # of a dimension, in the feature block
_SLOTS = 3  # bounds of kernel, output, input of a tile; a node's own layout stands in each
_HEADS = 2
# Blocks of node features that a ranker reads column by column, with their widths. They
# stand behind all others, in this order, and no transform changes them.
READ_BLOCKS = {"random_walk": 128, "dimension_tokens": 6 * TOKEN_FEATURES, "node_layout": 6}
# In place of layout values of a node that is not configurable (1st place): below them all.
SENTINEL = LAYOUT_VALUE_RANGE[0] - 1
_VALUES = LAYOUT_VALUE_RANGE[1] - SENTINEL + 1
# Element-wise operations of one operand, which the 5th place does not tell apart.
UNARY = (
    "abs", "cbrt", "ceil", "cosine", "exponential", "exponential-minus-one", "floor",
    "is-finite", "log", "log-plus-one", "logistic", "negate", "not", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "sign", "sine", "sqrt", "tan", "tanh")


class Opcodes(nn.Module):
  """Embedded opcodes.

  Attributes:
    features: width.
    max_norm: longer vectors are scaled to this length, 0 = none. As in PyTorch the factor
      has no gradient.
    gain: start of a learned factor; 0 = no factor.
    merge_unary: all of `UNARY` have the embedding of the first.
  """

  features: int
  max_norm: float = 0.0
  gain: float = 0.0
  merge_unary: bool = False

  @nn.compact
  def __call__(self, graph: jraph.GraphsTuple) -> jax.Array:
    """Embeds `graph.nodes["opcode"] [N]` to `[N, features]` float32."""
    if self.merge_unary:
      graph = graph._replace(nodes=graph.nodes | {"opcode": merged(graph.nodes["opcode"])})
    embedded = OpcodeEmbedding(self.features, name="embedding")(graph)
    if self.max_norm:
      square = jnp.sum(jnp.square(embedded), axis=-1, keepdims=True)
      longest = self.max_norm * jax.lax.rsqrt(jnp.maximum(square, 1e-12))
      embedded *= jax.lax.stop_gradient(jnp.minimum(longest, 1))
    if self.gain:
      embedded *= self.param("gain", nn.initializers.constant(self.gain), (), jnp.float32)
    return embedded


def merged(opcode: jax.Array) -> jax.Array:
  """Opcodes `[N]` with all opcodes of `UNARY` replaced by the first of them."""
  ids = opcode_ids()
  unary = np.array([ids[name] for name in UNARY])
  return jnp.where(jnp.isin(opcode, unary), unary[0], opcode)


class Values(nn.Module):
  """Configuration values as inputs of a linear layer.

  Attributes:
    encoding: one of `options.CHOICES`.
    count: values V of a configuration.
    scale: factor of `raw` values, or start of the learned factors of `gain`.
    features: width of the embedding of a value.
  """

  encoding: str
  count: int
  scale: float = 1.0
  features: int = 4

  def setup(self):
    if self.encoding == "embedding":
      self.table = nn.Embed(_VALUES, self.features)
    elif self.encoding == "gain":
      start = nn.initializers.constant(self.scale)
      self.gain = self.param("factors", start, (self.count,), jnp.float32)

  def configurations(self, values: jax.Array) -> jax.Array:
    """Configurations `[..., V]`, whole numbers if embedded, as `[..., V or V * features]`."""
    if self.encoding == "embedding":
      return self.embed(values)
    values = jnp.asarray(values, jnp.float32)
    if self.encoding == "raw":
      return self.scale * values
    return values * self.gain.reshape((1,) * (values.ndim - 1) + (-1,))

  def layouts(self, values: jax.Array) -> jax.Array:
    """Nodes' own layouts `[N, 6]`: embedded like configurations, or as they are."""
    return self.embed(values) if self.encoding == "embedding" else jnp.asarray(values)

  def embed(self, values: jax.Array) -> jax.Array:
    """Whole numbers `[..., V]` from -2 on through the shared table: `[..., V * features]`."""
    embedded = self.table(jnp.asarray(values, jnp.int32) - SENTINEL)
    return embedded.reshape(*values.shape[:-1], -1)


def unconfigured(missing: str, layout: Any, width: int) -> jax.Array:
  """Values in place of a configuration, `[N, width]` or `[1, width]` float32.

  Args:
    missing: `sentinel`, or `layout` for each node's own layout in every slot.
    layout: `[N, 6]` float32 own layouts, or None.
    width: values of a configuration, a multiple of 6.
  """
  if missing == "sentinel":
    return jnp.full((1, width), SENTINEL, jnp.float32)
  return jnp.tile(layout, (1, width // layout.shape[1]))


class ConfigPart(NamedTuple):
  """Features that depend on the configuration, not yet through their half of a layer.

  Attributes:
    width: number of features.
    through: the features `[..., width]` mapped by a function of single rows; None where
      all of them are zero.
  """

  width: int
  through: Callable[[Project], Nodes] | None


def layout_part(rows: jax.Array, missing: jax.Array | None, slates: Slates) -> ConfigPart:
  """Layout configurations of nodes.

  Args:
    rows: `[R, V]` encoded rows of the dictionary.
    missing: `[N, V]` or `[1, V]`, encoded, of nodes that are not configurable; None = zeros.
    slates: of the nodes.
  """
  batch = slates.batch

  def through(project: Project) -> SplitNodes:
    config = split_nodes.config_rows(project(rows), batch)
    shape = len(slates.graph_of), config.shape[2]
    other = jnp.zeros(shape) if missing is None else jnp.broadcast_to(project(missing), shape)
    own = take_rows(other, batch.by_hop.nodes[0])[:, None].astype(config.dtype)
    configured = split_nodes.is_configured_row(batch)[:, None, None]
    return SplitNodes(
        other[:, None].astype(config.dtype), jnp.where(configured, config, own), 0)

  return ConfigPart(rows.shape[1], through)


def tile_part(configs: jax.Array, slates: Slates) -> ConfigPart:
  """Tile configurations `[G, C, V]`, encoded, on every node of their kernels."""
  return ConfigPart(
      configs.shape[2], lambda project: pooling.per_node(project(configs), slates.graph_of))


def nodes_part(x: Nodes) -> ConfigPart:
  """Features of nodes that are there already."""
  rows = x.shared if isinstance(x, SplitNodes) else x
  return ConfigPart(rows.shape[-1], lambda project: jax.tree.map(project, x))


class Join(nn.Module):
  """One linear layer on node features and everything that depends on the configuration.

  Attributes:
    features: width of its result.
    matmul: product `[..., K] @ [K, F]` in the dtype of the computation.
  """

  features: int
  matmul: Callable[[jax.Array, jax.Array], jax.Array]

  @nn.compact
  def __call__(self, static: jax.Array, parts: Sequence[ConfigPart], slates: Slates) -> Nodes:
    """Joins `static [N, F]` with the parts: `[N, C, features]` in either form.

    Without parts there is one configuration, which stands for all.
    """
    blocks, bias = JoinedDense(self.features)(
        (static.shape[1], *(part.width for part in parts)))
    blocks = [blocks[0], *(block for part, block in zip(parts, blocks[1:]) if part.through)]
    parts = [part for part in parts if part.through]
    base = self.matmul(static, blocks[0])
    base += bias.astype(base.dtype)
    if not parts:
      return base[:, None]
    config = nodes.add(slates, *(
        part.through(lambda rows, kernel=kernel: self.matmul(rows, kernel))
        for part, kernel in zip(parts, blocks[1:])))
    return nodes.add(slates, config, nodes.spread(base, config, slates))


def places(minor_to_major: jax.Array) -> jax.Array:
  """Where layouts `[..., 6]` have each dimension: 0 = minor; -1 where they do not name it.

  The result is `[..., 6]` float32, by dimension.
  """
  named = jnp.asarray(minor_to_major)[..., :, None] == _numbers(minor_to_major.ndim + 1)
  order = 1.0 + jnp.arange(DIMENSIONS).reshape((1,) * (named.ndim - 2) + (-1, 1))
  return jnp.max(jnp.where(named, order, 0), axis=-2) - 1


def _numbers(rank: int) -> jax.Array:
  return jnp.arange(DIMENSIONS, dtype=jnp.float32).reshape((1,) * (rank - 1) + (-1,))


class DimensionEncoder(nn.Module):
  """Six tokens per node of a kernel through a linear layer and a transformer; their mean.

  Attributes:
    features: width.
    num_layers: of the transformer.
  """

  features: int
  num_layers: int = 2

  @nn.compact
  def __call__(self, columns: jax.Array, layout: jax.Array | None, slates: Slates) -> jax.Array:
    """Encodes nodes with the tiles of their kernels.

    Args:
      columns: `[N, 6 * 23]` float32, dimension after dimension.
      layout: `[N, 6]` float32 the nodes' own layouts, minor to major; None stands for -1
        throughout, as the 5th place has it for kernels.
      slates: of the nodes, with untransformed configurations.

    Returns:
      `[N, C, features]`.
    """
    count = len(columns)
    layout = jnp.full((count, DIMENSIONS), -1.0) if layout is None else layout
    own = jnp.broadcast_to(places(layout)[..., None], (count, DIMENSIONS, _SLOTS))
    number = jnp.broadcast_to(_numbers(2)[..., None], (count, DIMENSIONS, 1))
    static = [columns.reshape(count, DIMENSIONS, TOKEN_FEATURES), number, own]
    blocks, bias = JoinedDense(self.features, name="tokens")(
        (TOKEN_FEATURES + 1 + _SLOTS, _SLOTS))
    project = lambda x, kernel: layers.matmul(x, kernel, dtype=None, precision="highest")
    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    base = project(jnp.concatenate(static, axis=-1), blocks[0]) + bias[None]
    config = project(tile_tokens(jnp.asarray(slates.batch.config_feat)), blocks[1])
    x = pooling.per_node(flat(config), slates.graph_of) + flat(base)[:, None]
    tokens = nn.relu(x.reshape(*x.shape[:2], DIMENSIONS, self.features))
    for i in range(self.num_layers):
      tokens = EncoderLayer(self.features, _HEADS, name=f"layer_{i}")(tokens)
    return tokens.mean(axis=-2)


def once_each(
    encoder: DimensionEncoder, columns: jax.Array, layout: jax.Array | None, slates: Slates
) -> jax.Array:
  """`encoder(columns, layout, slates)`, computed once for nodes of a kernel with equal tokens.

  The published system does so (5th place). Among released kernels about a quarter of the
  nodes have tokens that no other node has. In a batch without `distinct` all nodes pass.
  """
  distinct = slates.batch.distinct
  if distinct is None:
    return encoder(columns, layout, slates)
  graph_of = slates.graph_of.at[distinct.first].get(mode="fill", fill_value=slates.graphs)
  take = lambda rows: None if rows is None else take_rows(rows, distinct.first)
  encoded = encoder(
      take(columns), take(layout), dataclasses.replace(slates, graph_of=graph_of))
  return take_rows(encoded, distinct.which)


def tile_tokens(configs: jax.Array) -> jax.Array:
  """The three bounds of tiles `[G, C, 24]` by dimension, `[G, C, 6, 3]`, as log(1 + x)."""
  bounds = configs.reshape(*configs.shape[:2], _SLOTS, -1)[..., :DIMENSIONS]
  return jnp.swapaxes(jnp.log1p(jnp.maximum(bounds, 0)), 2, 3)


def read_blocks(options: Options) -> tuple[str, ...]:
  """The names of `READ_BLOCKS` that a ranker with these options needs, in order."""
  needed = {"random_walk": bool(options.position_width),
            "node_layout": options.node_layout or options.missing == "layout",
            "dimension_tokens": options.dimension_encoder != "none"}
  return tuple(name for name in READ_BLOCKS if needed[name])


def token_columns(options: Options) -> int:
  """How many of the last columns of node features the tokens of dimensions depend on."""
  if options.dimension_encoder == "none":
    return 0
  return sum(READ_BLOCKS[name] for name in read_blocks(options) if name != "random_walk")


def split_blocks(feat: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
  """The last columns of `feat [N, F]` by block, `[N, width]` each; the others as ""."""
  blocks, end = {}, feat.shape[1]
  for name in reversed(names):
    blocks[name] = feat[:, end - READ_BLOCKS[name] : end]
    end -= READ_BLOCKS[name]
  return blocks | {"": feat[:, :end]}


class Inputs(nn.Module):
  """Opcodes, node features and configurations through their first linear layer.

  Attributes:
    options: of the ranker.
    matmul: as in `Join`.
    dense: makes linear layers by their width.
  """

  options: Options
  matmul: Callable[[jax.Array, jax.Array], jax.Array]
  dense: Callable[..., nn.Module]

  @nn.compact
  def __call__(self, slates: Slates) -> tuple[Nodes, jax.Array | None]:
    """First features `[N, C, H]` in either form, and random-walk features `[N, 128]` or None."""
    options, graph = self.options, slates.batch.graph
    blocks = split_blocks(jnp.asarray(graph.nodes["feat"]), read_blocks(options))
    feat, layout = blocks[""], blocks.get("node_layout")
    if options.feature_width:
      feat = self.dense(options.feature_width, name="features")(feat)
    opcodes = Opcodes(
        options.op_embed_dim, options.op_max_norm, options.op_gain, options.merge_unary,
        name="opcodes")
    static = [feat, opcodes(graph)]
    # Tokens hold the bounds of a tile; only their sums and products are missing (5th place).
    early = options.fusion == "early" and options.dimension_encoder == "none"
    values = config_values(slates)
    encode = Values(
        options.encoding, values.shape[-1], options.encoding_scale, options.value_embed_dim,
        name="values")
    if options.node_layout:
      static.append(encode.layouts(layout))
    joined = [self.config_part(encode, layout, slates)] if early else []
    if options.dimension_encoder != "none":
      tokens = DimensionEncoder(
          options.dimension_width, options.dimension_layers, name="dimensions")
      joined.append(nodes_part(once_each(
          tokens, blocks["dimension_tokens"], layout, slates)))
    width = gated_width(options, options.pre_widths[0])
    join = Join(width, self.matmul, name="join")
    return join(jnp.concatenate(static, axis=-1), joined, slates), blocks.get("random_walk")

  def config_part(self, encode: Values, layout: Any, slates: Slates) -> ConfigPart:
    """Configurations in front of the encoder."""
    values, missing = config_values(slates), None
    if slates.by_hop is None:
      return tile_part(encode.configurations(values), slates)
    if self.options.missing != "zero":
      missing = encode.configurations(
          unconfigured(self.options.missing, layout, values.shape[-1]))
    return layout_part(encode.configurations(values), missing, slates)


def config_values(slates: Slates) -> jax.Array:
  """Configurations as batches hold them: rows `[R, V]` of layouts, or tiles `[G, C, V]`."""
  batch = slates.batch
  return jnp.asarray(batch.config_feat if slates.by_hop is None else batch.rows)
