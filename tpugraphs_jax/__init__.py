"""Learned cost models for XLA: rank compiler configurations of a program graph.

`rank` orders the configurations of a graph, which comes from a file or a function
(`tpugraphs_jax.hlo.featurize`). A model is a folder of `run_tile.py`, `run_layout.py` or
`train_model`, a model file, or the name of a model that ships. `Ensemble` averages several models.

Examples:
  >>> import tpugraphs_jax
  >>> graph = tpugraphs_jax.read_layout(
  ...     "data/own/npz/layout/own/programs_cpu/test/experts_layer.npz")
  >>> order, scores = tpugraphs_jax.rank("layout-cpu-measured", graph)
  >>> graph.configs
  <LayoutConfigs: 48 layouts of 25 nodes in 7 groups, labels 286,808 to 733,053>
  >>> rows = tpugraphs_jax.explain("layout-cpu-measured", graph, int(order[-1]), against=0)
  >>> len(rows) > 0
  True

`print(graph)` and `print(rows)` show tables, `view.show(graph)` shows the program.
`tune(function, *arguments)` chooses layouts for a function, `apply` applies the layouts of a file,
and `estimate(function, *arguments)` estimates its time and memory on TPUs. Training is
`train_model(config, data_root=..., workdir=...)`, whose result has `metrics`, `model` and
`report()`.

Modules: `hlo` (graphs of your own programs), `collect` (labels for them), `metrics`, `report` and
`view`. docs/api.md has an example of every public name.
"""

from etils import epy

from tpugraphs_jax.infra import machine
from tpugraphs_jax.version import __version__ as __version__

__all__ = [
  "Ensemble",
  "OpGraph",
  "apply",
  "collect",
  "compare",
  "estimate",
  "explain",
  "hlo",
  "load",
  "load_config",
  "load_estimates",
  "metrics",
  "propose",
  "rank",
  "read_layout",
  "read_tile",
  "report",
  "train_model",
  "tune",
  "tune_tiles",
  "view",
]

with epy.lazy_api_imports(globals()):  # loaded when first used: importing the package stays quick
  from tpugraphs_jax import collect, hlo, metrics, report, view
  from tpugraphs_jax.data.npz import read_layout, read_tile
  from tpugraphs_jax.graph import OpGraph
  from tpugraphs_jax.rankers.ranker import Ensemble, explain, load, propose, rank
  from tpugraphs_jax.run.configs import load as load_config
  from tpugraphs_jax.run.python import train_model
  from tpugraphs_jax.tuning.comparison import compare
  from tpugraphs_jax.tuning.estimate import estimate
  from tpugraphs_jax.tuning.layouts import apply
  from tpugraphs_jax.tuning.summary import load as load_estimates
  from tpugraphs_jax.tuning.tiles import tune_tiles
  from tpugraphs_jax.tuning.tune import tune

machine.be_quiet()
machine.tell_interrupts()
