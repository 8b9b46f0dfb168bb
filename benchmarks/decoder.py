"""Training steps of language models on slices, with the shapes of runs that others measured.

A decoder in plain jax: scanned layers, RMS norm, rotary embedding, grouped queries, splash
attention, a gated feed-forward block, the cross-entropy of a vocabulary, and AdamW. Weights are
split over the axis `fsdp` and heads, hidden units and words over `tensor`, as MaxText splits them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp

P = jax.sharding.PartitionSpec
# Names of activations that MaxText's remat policies save or move to the host.
NAMES = ("decoder_layer_input", "query_proj", "key_proj", "value_proj", "out_proj")
# Further names: of the result of attention, and of what its kernel keeps for the backward pass.
ATTENTION, CONTEXT = "attention", "context"


@dataclasses.dataclass(frozen=True)
class Model:
  """Shapes of a decoder.

  Attributes:
    layers, width, hidden, heads, groups, head, words: sizes; `groups` of keys and values.
    has_head_norms: whether queries and keys are normalised (Qwen3).
  """

  layers: int
  width: int
  hidden: int
  heads: int
  groups: int
  head: int
  words: int
  has_head_norms: bool = False


MODELS = {
  "llama3.1-8b": Model(32, 4096, 14336, 32, 8, 128, 128256),
  "llama3.1-70b": Model(80, 8192, 28672, 64, 8, 128, 128256),
  "mistral-7b": Model(32, 4096, 14336, 32, 8, 128, 32000),
  "qwen3-8b": Model(36, 4096, 12288, 32, 8, 128, 151936, has_head_norms=True),
}


@dataclasses.dataclass(frozen=True)
class Step:
  """A training step.

  Attributes:
    model: its shapes.
    batch: sequences of a device along `fsdp`.
    length: tokens of a sequence.
    fsdp, tensor: devices along both axes of the mesh.
    saved, offloaded: names of activations that are kept for the backward pass, on the device and on
      the host; of the others each layer keeps its input and computes them again.
    is_saved_whole: whether no activation is computed again.
    attention: `splash`, or `dense` for one without a kernel.
    blocks: of the kernel: queries and keys of the forward pass, then of the backward pass.
    is_fused: whether one kernel of the backward pass computes all three gradients.
    weights: dtype of weights and moments.
    is_scanned: whether layers are a loop.
    loss: of `LOSSES`; `kept` is that of MaxText.
    chunks: parts of the rows whose logits are computed at a time.
    is_gathered: whether words are embedded by a gather; else by a product, as MaxText does.
    options: of the compiler.
  """

  model: Model
  batch: int
  length: int
  fsdp: int
  tensor: int = 1
  saved: tuple[str, ...] = ()
  offloaded: tuple[str, ...] = ()
  is_saved_whole: bool = False
  attention: str = "splash"
  blocks: tuple[int, int, int, int] = (2048,) * 4
  is_fused: bool = True
  weights: Any = jnp.float32
  is_scanned: bool = True
  loss: str = "kept"
  chunks: int = 1
  is_gathered: bool = False
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def program(step: Step) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """The jitted step and the shapes of its arguments: state, words, and words to predict."""
  mesh = jax.sharding.AbstractMesh((step.fsdp, step.tensor), ("fsdp", "tensor"))
  split = lambda spec: jax.sharding.NamedSharding(mesh, spec)
  shapes = _shapes(step)
  shardings = jax.tree.map(lambda one: split(one[1]), shapes, is_leaf=_is_shape)
  weights = jax.tree.map(
    lambda one: jax.ShapeDtypeStruct(one[0], step.weights, sharding=split(one[1])),
    shapes,
    is_leaf=_is_shape,
  )
  words = jax.ShapeDtypeStruct(
    (step.batch * step.fsdp, step.length), jnp.int32, sharding=split(P("fsdp"))
  )
  count = jax.ShapeDtypeStruct((), jnp.int32, sharding=split(P()))
  returned = (shardings, shardings, shardings, split(P())), split(P())
  train = jax.jit(
    functools.partial(_train, step, mesh, shardings),
    donate_argnums=0,
    out_shardings=returned,
    compiler_options=dict(step.options),
  )
  return train, ((weights, weights, weights, count), words, words)


def _is_shape(value: Any) -> bool:
  return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], P)


def _shapes(step: Step) -> dict[str, Any]:
  """The shape and the sharding of each weight."""
  model = step.model
  of_layer = {
    "query": ((model.width, model.heads * model.head), P("fsdp", "tensor")),
    "key": ((model.width, model.groups * model.head), P("fsdp", "tensor")),
    "value": ((model.width, model.groups * model.head), P("fsdp", "tensor")),
    "out": ((model.heads * model.head, model.width), P("tensor", "fsdp")),
    "gate": ((model.width, model.hidden), P("fsdp", "tensor")),
    "up": ((model.width, model.hidden), P("fsdp", "tensor")),
    "down": ((model.hidden, model.width), P("tensor", "fsdp")),
    "before_attention": ((model.width,), P("fsdp")),
    "before_hidden": ((model.width,), P("fsdp")),
  }
  if model.has_head_norms:
    of_layer |= {"query_norm": ((model.head,), P()), "key_norm": ((model.head,), P())}
  stacked = {
    name: ((model.layers, *shape), P(None, *spec)) for name, (shape, spec) in of_layer.items()
  }
  layers = stacked if step.is_scanned else [of_layer] * model.layers
  return {
    "layers": layers,
    "table": ((model.words, model.width), P("tensor", "fsdp")),
    "logits": ((model.width, model.words), P("fsdp", "tensor")),
    "last": ((model.width,), P("fsdp")),
  }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
  return wide.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1)).astype(x.dtype)


def _angles(step: Step) -> tuple[jax.Array, jax.Array]:
  """Cosine and sine of the rotary embedding, `[1, length, 1, head / 2]`."""
  half = step.model.head // 2
  frequencies = 500000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = jnp.outer(jnp.arange(step.length, dtype=jnp.float32), frequencies)[None, :, None]
  return jnp.cos(angles), jnp.sin(angles)


def _rotated(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
  """The rotary embedding of `[batch, length, heads, head]`."""
  (cosine, sine), (first, second) = angles, jnp.split(x.astype(jnp.float32), 2, -1)
  turned = first * cosine - second * sine, second * cosine + first * sine
  return jnp.concatenate(turned, -1).astype(x.dtype)


def _attention(step: Step, mesh: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Causal attention of `[batch, length, heads, head]`."""
  q = q / math.sqrt(q.shape[-1])
  if step.attention == "dense":
    return jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True)
  rows, columns, rows_back, columns_back = (min(size, step.length) for size in step.blocks)
  other = None if step.is_fused else rows_back, None if step.is_fused else columns_back
  sizes = splash.BlockSizes(
    block_q=rows,
    block_kv=columns,
    block_kv_compute=columns,
    block_q_dkv=rows_back,
    block_kv_dkv=columns_back,
    block_kv_dkv_compute=columns_back,
    block_q_dq=other[0],
    block_kv_dq=other[1],
    use_fused_bwd_kernel=step.is_fused,
  )
  heads = step.model.heads // step.tensor
  mask = splash.MultiHeadMask([splash.CausalMask((step.length, step.length))] * heads)
  kernel = splash.make_splash_mha(
    mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, residual_checkpoint_name=CONTEXT
  )
  spec = P("fsdp", "tensor", None, None)
  mapped = jax.shard_map(
    lambda q, k, v: jax.vmap(kernel)(q, k, v),
    mesh=mesh,
    in_specs=(spec,) * 3,
    out_specs=spec,
    check_vma=False,
  )
  return mapped(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def _layer(
  step: Step, mesh: Any, x: jax.Array, weights: Mapping[str, jax.Array], angles: Any
) -> jax.Array:
  w = {name: weight.astype(x.dtype) for name, weight in weights.items()}
  split = lambda x, *spec: jax.lax.with_sharding_constraint(
    x, jax.sharding.NamedSharding(mesh, P("fsdp", *spec))
  )
  x = split(checkpoint_name(x, "decoder_layer_input"))
  y = _norm(x, w["before_attention"])
  q, k, v = (
    split((y @ w[name]).reshape(*y.shape[:2], -1, step.model.head), None, "tensor")
    for name in ("query", "key", "value")
  )
  if step.model.has_head_norms:
    q, k = _norm(q, w["query_norm"]), _norm(k, w["key_norm"])
  q = checkpoint_name(_rotated(q, angles), "query_proj")
  k = checkpoint_name(_rotated(k, angles), "key_proj")
  mixed = _attention(step, mesh, q, k, checkpoint_name(v, "value_proj"))
  mixed = checkpoint_name(mixed, ATTENTION)
  x = x + split(checkpoint_name(mixed.reshape(*y.shape[:2], -1) @ w["out"], "out_proj"))
  y = _norm(x, w["before_hidden"])
  gate = checkpoint_name(split(y @ w["gate"], None, "tensor"), "gate")
  up = checkpoint_name(split(y @ w["up"], None, "tensor"), "up")
  return split(x + (jax.nn.silu(gate) * up) @ w["down"])


def _gathered(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """The cross-entropy of each position, by the logarithm of the softmax of all words."""
  logs = jax.nn.log_softmax(logits.astype(jnp.float32))
  return -jnp.take_along_axis(logs, targets[..., None], -1)[..., 0]


@jax.custom_vjp
def _kept(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """As `_gathered`; the exponentials of all words are kept for the backward pass."""
  return _kept_forward(logits, targets)[0]


def _kept_forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
  wide = logits.astype(jnp.float32)
  shifted = wide - jnp.max(wide, -1, keepdims=True)
  exponentials = jnp.exp(shifted)
  total = jnp.sum(exponentials, -1, keepdims=True)
  chosen = jax.nn.one_hot(targets, logits.shape[-1], dtype=jnp.float32)
  loss = -jnp.sum(chosen * (shifted - jnp.log(total)), -1)
  return loss, (exponentials, total, targets, jnp.zeros((), logits.dtype))


def _kept_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
  exponentials, total, targets, zero = kept
  chosen = jax.nn.one_hot(targets, exponentials.shape[-1], dtype=jnp.float32)
  of_logits = (exponentials / total - chosen) * gradient[..., None]
  return of_logits.astype(zero.dtype), None


_kept.defvjp(_kept_forward, _kept_backward)
LOSSES = {"gathered": _gathered, "kept": _kept}


def _loss(step: Step, mesh: Any, weights: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
  narrow = jnp.bfloat16
  table = weights["table"].astype(narrow)
  x = table[words] if step.is_gathered else jax.nn.one_hot(words, len(table), dtype=narrow) @ table
  layer, angles = functools.partial(_layer, step, mesh), _angles(step)
  if not step.is_saved_whole:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=list(step.saved),
      names_which_can_be_offloaded=list(step.offloaded),
      offload_src="device",
      offload_dst="pinned_host",
    )
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=not step.is_scanned)
  if step.is_scanned:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w, angles), None), x, weights["layers"])
  else:
    for of_layer in weights["layers"]:
      x = layer(x, of_layer, angles)
  x = _norm(x, weights["last"].astype(narrow))
  of_part = lambda x, targets, weights: jnp.sum(LOSSES[step.loss](x @ weights, targets))
  if step.chunks > 1:
    of_part = jax.checkpoint(of_part)
  parts = (jnp.split(array, step.chunks, 1) for array in (x, targets))
  logits = weights["logits"].astype(narrow)
  return sum(of_part(*part, logits) for part in zip(*parts)) / targets.size


def _train(
  step: Step, mesh: Any, shardings: Any, state: Any, words: jax.Array, targets: jax.Array
) -> tuple[Any, jax.Array]:
  """A step of AdamW, with gradients of norm 1 at the most."""
  weights, first, second, count = state
  loss, gradients = jax.value_and_grad(functools.partial(_loss, step, mesh))(
    weights, words, targets
  )
  gradients = jax.lax.with_sharding_constraint(gradients, shardings)
  squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients))
  scale = jnp.minimum(1.0, jax.lax.rsqrt(sum(squares)))
  count = count + 1
  time = count.astype(jnp.float32)

  def update(w: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    g = g.astype(jnp.float32) * scale
    m = 0.9 * m.astype(jnp.float32) + 0.1 * g
    v = 0.95 * v.astype(jnp.float32) + 0.05 * jnp.square(g)
    moved = m / (1 - 0.9**time) / (jnp.sqrt(v / (1 - 0.95**time)) + 1e-8)
    wide = w.astype(jnp.float32)
    wide -= 3e-5 * (moved + 0.1 * wide)
    return tuple(x.astype(w.dtype) for x in (wide, m, v))

  updated = jax.tree.map(update, weights, first, second, gradients)
  of_place = lambda place: jax.tree.map(
    lambda values: values[place], updated, is_leaf=lambda value: isinstance(value, tuple)
  )
  return (of_place(0), of_place(1), of_place(2), count), loss
