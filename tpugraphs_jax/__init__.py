"""Learned cost models for XLA: rank compiler configurations of a program graph.

  order, scores = tpugraphs_jax.rank("out/tile", graph)

ranks the configurations of an `OpGraph` with a model trained by `run_tile.py` or
`run_layout.py`; `load` gives the model itself, also one that ships, `Ensemble` several
as one, `tpugraphs_jax.hlo` makes graphs from the user's own programs, `tune` chooses
layouts for one, and `apply` applies those of a file. To train in Python:

  run = tpugraphs_jax.train_model(
      "tile.py:recommended", data_root="~/data/tpugraphs/npz", workdir="out/tile", seed=1)
  run.metrics, run.model, run.report()

The modules `collect` (label programs of your own), `metrics`, `report` and `training` come
with the package: `from tpugraphs_jax import metrics`.
"""

from etils import epy

from tpugraphs_jax.infra import libtpu

__version__ = "0.1.0"
__all__ = ["Ensemble", "OpGraph", "apply", "collect", "explain", "hlo", "load", "load_config",
           "metrics",
           "propose", "rank", "read_layout", "read_tile", "report", "train_model", "training",
           "tune"]

with epy.lazy_api_imports(globals()):  # loaded when first used: importing the package stays quick
  from tpugraphs_jax import collect, hlo, metrics, report
  from tpugraphs_jax.collect.layouts import apply
  from tpugraphs_jax.collect.tuning import tune
  from tpugraphs_jax.data.npz import read_layout, read_tile
  from tpugraphs_jax.graph import OpGraph
  from tpugraphs_jax.run import training
  from tpugraphs_jax.run.configs import load as load_config
  from tpugraphs_jax.run.python import train_model
  from tpugraphs_jax.serve.ensemble import Ensemble
  from tpugraphs_jax.serve.ranker import explain, load, propose, rank

libtpu.be_quiet()
