"""Learned cost models for XLA: rank compiler configurations of a program graph.

  order, scores = tpugraphs_jax.rank("out/tile", graph)

ranks the configurations of an `OpGraph` with a model trained by `run_tile.py` or
`run_layout.py`; `load` gives the model itself, also one that ships, `Ensemble` several
as one, `tpugraphs_jax.hlo` makes graphs from the user's own programs, and `tune` chooses
layouts for one. To train in Python:

  config = tpugraphs_jax.load_config("tile.py:recommended")
  config.data_root = "~/data/tpugraphs/npz"
  tpugraphs_jax.training.run(config, Path("out/tile"))

The modules `collect` (label programs of your own), `metrics`, `report` and `training` come
with the package: `from tpugraphs_jax import metrics`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Ensemble", "OpGraph", "collect", "explain", "hlo", "load", "load_config", "metrics",
           "propose", "rank", "read_layout", "read_tile", "report", "training", "tune"]

# Loaded when first used: importing the package stays quick.
_HOMES = {
    "Ensemble": "tpugraphs_jax.serve.ensemble",
    "OpGraph": "tpugraphs_jax.graph",
    "explain": "tpugraphs_jax.serve.ranker",
    "load": "tpugraphs_jax.serve.ranker",
    "load_config": "tpugraphs_jax.run.configs",
    "propose": "tpugraphs_jax.serve.ranker",
    "rank": "tpugraphs_jax.serve.ranker",
    "read_layout": "tpugraphs_jax.data.npz",
    "read_tile": "tpugraphs_jax.data.npz",
    "tune": "tpugraphs_jax.collect.tuning",
}
_MODULES = {"collect": "collect", "hlo": "hlo", "metrics": "metrics", "report": "report",
            "training": "run.training"}


def __getattr__(name: str) -> Any:
  if name in _HOMES:
    return getattr(importlib.import_module(_HOMES[name]), name.removesuffix("_config"))
  if name in _MODULES:
    return importlib.import_module(f"tpugraphs_jax.{_MODULES[name]}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return [*__all__, "__version__"]
