"""Drawn programs of families that judge a search: none is like a training family by design."""

from _blocks import programs

SPLIT = "test"

PROGRAMS = programs(
  "large_kernel",
  "ladder",
  "connected",
  "causal_waves",
  "fused_attention",
  "looking_across",
  "compressed_fields",
  "routed",
  "messages",
  "gated_recurrence",
  seeds=range(4),
)
