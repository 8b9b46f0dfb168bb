"""Learned cost models for XLA: rank compiler configurations of a program graph.

  order, scores = tpugraphs_jax.rank("out/tile", graph)

ranks the configurations of an `OpGraph` with a model trained by `run_tile.py` or
`run_layout.py`; `load` gives the model itself, also one that ships, `Ensemble` several
as one, `tpugraphs_jax.hlo` makes graphs from the user's own programs, and `tune` chooses
layouts for one.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Ensemble", "OpGraph", "explain", "hlo", "load", "propose", "rank", "read_layout",
           "read_tile", "tune"]

# Loaded when first used: importing the package stays quick.
_HOMES = {
    "Ensemble": "tpugraphs_jax.serve.ensemble",
    "OpGraph": "tpugraphs_jax.graph",
    "explain": "tpugraphs_jax.serve.ranker",
    "load": "tpugraphs_jax.serve.ranker",
    "propose": "tpugraphs_jax.serve.ranker",
    "rank": "tpugraphs_jax.serve.ranker",
    "read_layout": "tpugraphs_jax.data.npz",
    "read_tile": "tpugraphs_jax.data.npz",
    "tune": "tpugraphs_jax.collect.tuning",
}


def __getattr__(name: str) -> Any:
  if name in _HOMES:
    return getattr(importlib.import_module(_HOMES[name]), name)
  if name == "hlo":
    return importlib.import_module("tpugraphs_jax.hlo")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
