"""Drawn programs of more training families, in which there is more to gain."""

from _blocks import programs

SPLIT = "train"

PROGRAMS = programs(
  "cardinal",
  "inverted",
  "separable",
  "group_normed",
  "axial",
  "shared_keys",
  "dots_of_fields",
  "outer_products",
  seeds=range(4),
)
