"""HLO programs and the data set's raw protobufs as graphs.

  graph = hlo.featurize(function, *example_arguments).with_layouts(1000)

`featurize(..., target="v3")` and `kernels` ask the TPU compiler, on any machine.
`python -m tpugraphs_jax.hlo` converts and shows files. jax is imported only for
functions, jax's stages and HLO text.
"""

from etils import epy

from tpugraphs_jax.hlo.module_graph import featurize, HloGraph, Origin
from tpugraphs_jax.hlo.tuning_data import read_tuning, TuningGraphs

with epy.lazy_api_imports(globals()):  # of the TPU compiler, which stands above this package
  from tpugraphs_jax.tuning.tpu_kernels import Kernel, kernels

__all__ = ["HloGraph", "Kernel", "Origin", "TuningGraphs", "featurize", "kernels", "read_tuning"]
