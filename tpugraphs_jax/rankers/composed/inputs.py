"""Everything in front of the encoder's first nonlinearity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tpugraphs_jax.columns import LAYOUT_CONFIG_FEATURES, TILE_CONFIG_FEATURES
from tpugraphs_jax.rankers.composed import dimensions, encodings, parts
from tpugraphs_jax.rankers.composed.blocks import gated_width
from tpugraphs_jax.rankers.composed.nodes import Nodes, Slates
from tpugraphs_jax.rankers.composed.options import Options

# Blocks of node features that a ranker reads column by column, with their widths. They
# stand behind all others, in this order, and no transform changes them.
READ_BLOCKS = {"random_walk": 128, "dimension_tokens": 6 * dimensions.FEATURES, "node_layout": 6}


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
  found, end = {}, feat.shape[1]
  for name in reversed(names):
    found[name] = feat[:, end - READ_BLOCKS[name] : end]
    end -= READ_BLOCKS[name]
  return found | {"": feat[:, :end]}


class Inputs(nn.Module):
  """Opcodes, node features and configurations through their first linear layer.

  Attributes:
    options: of the ranker.
    matmul: as in `parts.Join`.
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
    opcodes = encodings.Opcodes(
        options.op_embed_dim, options.op_max_norm, options.op_gain, options.merge_unary,
        name="opcodes")
    static = [feat, opcodes(graph)]
    # Tokens hold all of a tile but sums and products of its bounds (5th place).
    alone = slates.by_hop is None and options.dimension_encoder != "none"
    early = options.fusion == "early" and not alone
    values = config_values(slates)
    encode = encodings.Values(
        options.encoding, values.shape[-1], options.encoding_scale, options.value_embed_dim,
        name="values")
    if options.node_layout:
      static.append(encode.layouts(layout))
    joined = [self.config_part(encode, layout, slates)] if early else []
    if options.both_kinds:
      # The rows of the layer's kernel: nodes, then layouts, then tiles.
      if slates.by_hop is None:
        own = encodings.unconfigured(options.missing, layout, LAYOUT_CONFIG_FEATURES)
        static.append(encode.configurations(own))
      else:
        joined.append(parts.absent(TILE_CONFIG_FEATURES))
    if options.dimension_encoder != "none":
      tokens = dimensions.DimensionEncoder(
          options.dimension_width, options.dimension_layers, options.share, name="dimensions")
      joined.append(parts.nodes_part(dimensions.once_each(
          tokens, blocks["dimension_tokens"], layout, slates)))
    width = gated_width(options, options.pre_widths[0])
    join = parts.Join(width, self.matmul, options.share, name="join")
    return join(jnp.concatenate(static, axis=-1), joined, slates), blocks.get("random_walk")

  def config_part(self, encode: encodings.Values, layout: Any, slates: Slates) -> parts.Part:
    """Configurations in front of the encoder."""
    values, missing = config_values(slates), None
    if slates.by_hop is None:
      if self.options.both_kinds:  # a transform that was fitted would leave out columns
        values = jnp.log1p(jnp.maximum(values, 0))
      return parts.tile_part(encode.configurations(values), slates)
    if self.options.missing != "zero":
      missing = encode.configurations(
          encodings.unconfigured(self.options.missing, layout, values.shape[-1]))
    return parts.layout_part(encode.configurations(values), missing, slates)


def config_values(slates: Slates) -> jax.Array:
  """Configurations as batches hold them: rows `[R, V]` of layouts, or tiles `[G, C, V]`."""
  batch = slates.batch
  return jnp.asarray(batch.config_feat if slates.by_hop is None else batch.rows)
