"""HLO opcodes and element types, as the data set numbers them."""

from __future__ import annotations

import csv
import functools
from importlib import resources

# XLA's number and the short name of the element types that have a one-hot
# column (columns 2..20), in the order of the columns.
ELEMENT_TYPES = (
    (0, "invalid"), (1, "pred"), (2, "s8"), (3, "s16"), (4, "s32"), (5, "s64"),
    (6, "u8"), (7, "u16"), (8, "u32"), (9, "u64"), (10, "f16"), (11, "f32"),
    (12, "f64"), (16, "bf16"), (15, "c64"), (18, "c128"), (13, "tuple"),
    (14, "opaque"), (17, "token"),
)


@functools.cache
def opcode_ids() -> dict[str, int]:
  """Opcode name to id, 1..120; a name that is not here has id 0."""
  text = resources.files(__package__).joinpath("opcodes.csv").read_text("utf-8")
  return {row["opcode"]: int(row["id"]) for row in csv.DictReader(text.splitlines())}
