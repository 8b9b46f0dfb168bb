"""Options of the composed ranker, and the checks that options fit together."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from tpugraphs_jax.rankers.composed import pooling
from tpugraphs_jax.nn.aggregation import BOTH, OPERANDS, USERS

# The neighbours that a node receives messages from, each kind with weights of its own.
EDGE_DIRECTIONS = {"forward": (OPERANDS,), "backward": (USERS,),
                   "bidirectional": (OPERANDS, USERS), "symmetric": (BOTH,)}
ACTIVATIONS = ("none", "relu", "leaky_relu", "prelu", "gelu", "silu", "elu", "tanh")
FUSIONS = {"layout": ("early", "middle"), "tile": ("early", "late", "cross")}

# The values of each option that is a name.
CHOICES = {
    "encoding": ("raw", "gain", "embedding"), "missing": ("zero", "sentinel", "layout"),
    "dimension_encoder": ("none", "transformer"), "edge_direction": tuple(EDGE_DIRECTIONS),
    "direction_merge": ("sum", "concat"), "conv": ("sage", "gatv2", "gin", "appnp"),
    "activation": ACTIVATIONS, "conv_activation": (*ACTIVATIONS, "same"),
    "norm": ("none", "layer", "instance"), "norm_position": ("pre", "post", "after_activation"),
    "residual": ("none", "identity", "gated"),
    "residual_position": ("before_activation", "after_activation"),
    "global_attention": ("none", "softmax", "linear", "difformer"),
    "attention_combine": ("sum", "concat", "serial"),
    "config_attention": ("none", "softmax_gate"), "pooling_merge": ("concat", "sum"),
    "readout": ("pool", "node_scalar_sum", "lstm", "transformer"),
    "readout_layers": ("last", "all"), "readout_norm": ("none", "l2"),
    "head_norm": ("none", "configuration"),
}
DROPOUTS = ("first", "linear", "layers", "fusion", "head")
_SEQUENCES = ("pre_widths", "widths", "post_widths", "fusion_widths", "pooling", "head_widths",
              "dropout_in")
# The smallest value of each option that is a number.
_LEAST = {"op_embed_dim": 1, "op_max_norm": 0, "op_gain": 0, "value_embed_dim": 1,
          "dimension_width": 1, "dimension_layers": 1, "position_width": 0, "feature_width": 0,
          "heads": 1, "appnp_steps": 1, "dropout": 0, "drop_edge": 0, "attention_keys": 0,
          "attention_from": 0, "channel_attention": 0, "decoder_layers": 1}


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the ranker; `first`, ..., `tenth` are places of the "Fast or Slow?" competition.

  Attributes:
    op_embed_dim: width of the opcode embedding.
    op_max_norm: longest embedding of an opcode, longer ones are shortened; 0 = any.
    op_gain: start of a learned factor of opcode embeddings (Graph Segment Training: 100);
      0 = no factor.
    merge_unary: element-wise operations of one operand share an embedding (fifth).
    encoding: configuration values as they are (`raw`), times learned factors (`gain`), or
      each through one embedding that all share (`embedding`, first).
    encoding_scale: factor of raw values (third: 1/5), start of learned factors (100).
    value_embed_dim: width of the embedding of each layout value.
    missing: configuration of nodes that are not configurable: zeros, the value
      -2 throughout (`sentinel`, first) or its own layout in every slot (`layout`, fifth).
    node_layout: nodes have their own layout as a feature, from the block `node_layout`.
    dimension_encoder: `transformer` over one token per tensor dimension (fifth, tiles alone),
      from the feature block `dimension_tokens`; tokens hold own layouts with `node_layout`,
      else -1.
    dimension_width: width of these tokens.
    dimension_layers: layers of that transformer.
    position_width: width of a track of positions of its own, from the feature block
      `random_walk` (third: 64); 0 = none.
    feature_width: node features pass a linear layer of this width first (second: 20); 0 = not.
    pre_widths: linear layers with norm and activation in front of the first convolution.
    widths: of the layers of the encoder.
    post_widths: linear layers on nodes after the last.
    edge_direction: messages go `forward` from producers to consumers, `backward`, in both
      directions with separate weights, or alike in both (`symmetric`).
    direction_merge: results of two directions are added, or of half the width side by side.
    conv: convolution of a layer along edges.
    heads: of `gatv2` and of attention.
    appnp_steps: steps of propagation in a layer.
    appnp_restart: weight of a layer's input in each step.
    activation: of every layer.
    conv_activation: after convolutions, where it is another one (Graph Segment Training: none).
    norm: of every layer: of each node (`layer`), or over the nodes of a graph (`instance`).
    norm_position: before a layer, before its activation, or after its activation.
    residual: a layer adds its output to its input (`identity`), or mixes the two by a learned
      gate (`gated`), where their widths match.
    residual_position: of that addition.
    dropout: share of features that training leaves out, the same for all configurations.
    dropout_in: where: behind the `first` linear layer, all `linear` ones on nodes, the `layers`
      of the encoder, the configurations of a `fusion` that is late, the layers of the `head`.
    drop_edge: largest share of edges that training leaves out.
    global_attention: between all nodes of a graph: `softmax`, or at a cost that grows with
      the number of nodes alone `linear` (third, tenth) or `difformer` (tenth).
    attention_combine: attention and convolution are added, side by side, or one after the
      other (`serial`).
    attention_keys: width of queries and keys; 0 = the width of the layer.
    attention_normalize: weights of linear attention add up to 1 (third: not).
    attention_from: number of the first layer with attention.
    channel_attention: a gate per channel from a bottleneck that many times narrower
      (first: 8); 0 = none.
    config_attention: a node's features beside themselves weighted by a softmax over the
      configurations of the slate (first).
    config_temperature: start of the learned temperature of that softmax.
    fusion: where configurations join: in front of the encoder, on its configurable nodes
      (`middle`, tenth), beside the pooled graph (`late`), or as queries to its nodes (`cross`).
    fusion_widths: layers on configurations there.
    decoder_layers: layers of `cross`, or of the readout `transformer`.
    readout: pool and then the head; or a scalar per node and their sum (second); or the last
      state of an LSTM over nodes in order, or a transformer over nodes in front of pooling
      (MLSys 2021).
    readout_layers: the `last` layer of the encoder is read out, or the sum of `all` layers
      (sixth, whose means over nodes of all layers are added).
    pooling: names of `nn.pooling`.
    pooling_merge: poolings side by side, or added.
    readout_norm: `l2` gives pooled features length 1.
    score_scale: factor of the sum of scalars (second: 1e-3, milliseconds to seconds).
    head_widths: layers of the head before its last.
    head_norm: of these layers: `configuration` normalises over the slate (sixth).
    dtype: of the computation.
    precision: of matrix products.
  """

  op_embed_dim: int = 32
  op_max_norm: float = 0.0
  op_gain: float = 0.0
  merge_unary: bool = False
  encoding: str = "raw"
  encoding_scale: float = 1.0
  value_embed_dim: int = 4
  missing: str = "zero"
  node_layout: bool = False
  dimension_encoder: str = "none"
  dimension_width: int = 256
  dimension_layers: int = 2
  position_width: int = 0
  feature_width: int = 0
  pre_widths: Sequence[int] = (64,)
  widths: Sequence[int] = (64, 64, 64)
  post_widths: Sequence[int] = ()
  edge_direction: str = "bidirectional"
  direction_merge: str = "sum"
  conv: str = "sage"
  heads: int = 1
  appnp_steps: int = 10
  appnp_restart: float = 0.1
  activation: str = "relu"
  conv_activation: str = "same"
  norm: str = "none"
  norm_position: str = "post"
  residual: str = "none"
  residual_position: str = "before_activation"
  dropout: float = 0.0
  dropout_in: Sequence[str] = ("linear", "layers")
  drop_edge: float = 0.0
  global_attention: str = "none"
  attention_combine: str = "sum"
  attention_keys: int = 0
  attention_normalize: bool = True
  attention_from: int = 0
  channel_attention: int = 0
  config_attention: str = "none"
  config_temperature: float = 0.5
  fusion: str = "early"
  fusion_widths: Sequence[int] = (64,)
  decoder_layers: int = 1
  readout: str = "pool"
  readout_layers: str = "last"
  pooling: Sequence[str] = ("mean",)
  pooling_merge: str = "concat"
  readout_norm: str = "none"
  score_scale: float = 1.0
  head_widths: Sequence[int] = ()
  head_norm: str = "none"
  dtype: str | None = None
  precision: str | None = None

  def __post_init__(self):
    for name in _SEQUENCES:  # a file keeps lists
      object.__setattr__(self, name, tuple(getattr(self, name)))

  @property
  def after_conv(self) -> str:
    """The activation behind a convolution."""
    return self.activation if self.conv_activation == "same" else self.conv_activation

  @property
  def head_in_embed(self) -> bool:
    """Whether the head runs within `embed`: it needs the mask of the slate, or drops features."""
    return bool(self.head_widths) and (
        self.head_norm == "configuration" or self.dropout > 0 and "head" in self.dropout_in)

  def attends(self, layer: int) -> bool:
    """Whether that layer has attention between nodes."""
    return self.global_attention != "none" and layer >= self.attention_from


def check(options: Options, kind: str) -> Options:
  """The options, if a ranker for tiles or layouts can have them together.

  Raises:
    ValueError: with the option (`model.NAME`), its value and what was expected.
  """
  for name, allowed in (CHOICES | {"fusion": FUSIONS[kind]}).items():
    if (value := getattr(options, name)) not in allowed:
      raise ValueError(f"model.{name} is {value!r}, expected one of {', '.join(allowed)}")
  for name, least in _LEAST.items():
    if not (value := getattr(options, name)) >= least:
      raise ValueError(f"model.{name} is {value}, expected at least {least}")
  for name in ("dropout", "drop_edge"):
    if not (value := getattr(options, name)) < 1:
      raise ValueError(f"model.{name} is {value}, expected a share below 1")
  if unknown := set(options.dropout_in) - set(DROPOUTS):
    raise ValueError(f"model.dropout_in has {min(unknown)!r}, expected some of "
                     f"{', '.join(DROPOUTS)}")
  _check_numbers(options)
  known = pooling.names() if kind == "layout" else list(pooling.POOLINGS)
  if not options.pooling or set(options.pooling) - set(known):
    raise ValueError(f"model.pooling is {options.pooling}, expected some of {', '.join(known)}")
  for is_there, advice in _conflicts(options, kind):
    if is_there:
      raise ValueError(advice)
  return options


def _check_numbers(options: Options) -> None:
  for name in ("pre_widths", "widths", "post_widths", "fusion_widths", "head_widths"):
    if any(width < 1 for width in getattr(options, name)):
      raise ValueError(f"model.{name} is {getattr(options, name)}, expected widths of at least 1")
  if not options.pre_widths:
    raise ValueError("model.pre_widths is empty, expected at least the width of the layer where "
                     "node features and configurations meet")
  if options.fusion in ("middle", "cross") and not options.fusion_widths:
    raise ValueError(f"model.fusion_widths is empty, expected at least one width with "
                     f"model.fusion={options.fusion}")
  if options.config_attention != "none" and any(
      width % 2 for width in options.pre_widths + options.widths + options.post_widths):
    raise ValueError("model.config_attention puts two halves side by side: take even widths")
  if options.direction_merge == "concat" and any(width % 2 for width in options.widths):
    raise ValueError("model.direction_merge is 'concat', which puts two halves side by side: "
                     "take even model.widths")
  # Attention by heads splits the width of the layer that it stands in.
  split = options.heads if options.conv == "gatv2" or options.global_attention != "none" else 1
  if any(width % split for width in options.widths):
    raise ValueError(f"model.heads is {options.heads}, expected a divisor of all model.widths "
                     f"{options.widths}")
  if options.attention_keys % split:
    raise ValueError(f"model.heads is {options.heads}, expected a divisor of model.attention_keys, "
                     f"which is {options.attention_keys}")


def _conflicts(options: Options, kind: str) -> list[tuple[bool, str]]:
  """Combinations that are refused: whether each is there, and the message with the remedy."""
  early, tile = options.fusion == "early", kind == "tile"
  alike = "where all configurations are alike: take model.fusion=early"
  return [
      (not early and options.config_attention != "none",
       f"model.config_attention looks across configurations {alike}"),
      (not early and options.dimension_encoder != "none" and tile,
       f"model.dimension_encoder joins tiles to nodes {alike}"),
      (tile and options.encoding == "embedding",
       "model.encoding is 'embedding', but tile configurations are no layout values: take raw "
       "or gain"),
      (tile and options.missing != "zero",
       f"model.missing is {options.missing!r}, but every node of a kernel has its configuration: "
       "set it to zero"),
      (options.dimension_encoder != "none" and not tile,
       "model.dimension_encoder is for tiles: set it to none"),
      (options.fusion in ("middle", "cross") and options.readout != "pool",
       f"model.readout is {options.readout!r}, but model.fusion={options.fusion} pools itself: "
       "set it to pool"),
      (not tile and options.readout in ("lstm", "transformer"),
       f"model.readout is {options.readout!r}, which is for kernels of few nodes: take pool"),
      (options.fusion == "late" and options.readout == "node_scalar_sum",
       "model.readout is 'node_scalar_sum', which sums scores of nodes that know their "
       "configuration: take model.fusion=early"),
      (options.readout == "node_scalar_sum" and bool(options.head_widths),
       "model.readout is 'node_scalar_sum', which has no head: set model.head_widths to ()"),
      (options.fusion == "middle" and any(name.startswith(pooling.CONFIGURABLE)
                                          for name in options.pooling),
       "model.fusion is 'middle', where all nodes that are pooled are configurable: leave config_ "
       "out of model.pooling"),
      (options.readout_layers == "all" and not options.widths,
       "model.readout_layers is 'all', but model.widths is empty: give the encoder layers or take "
       "last"),
      (options.readout_layers == "all" and len(set(options.widths)) > 1,
       "model.readout_layers is 'all', which adds layers up: take model.widths that are equal"),
      (options.readout_layers == "all" and bool(options.post_widths),
       "model.readout_layers is 'all', which reads out what model.post_widths would change: set "
       "that to ()"),
      (options.edge_direction != "bidirectional" and options.direction_merge == "concat",
       "model.direction_merge is 'concat', which needs model.edge_direction=bidirectional"),
  ]
