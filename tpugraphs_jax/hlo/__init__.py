"""HLO programs and the data set's raw protobufs as graphs.

  graph = hlo.featurize(function, *example_arguments).with_layouts(1000)

`featurize(..., target="v3")` and `kernels` ask the TPU compiler, on any machine.
`python -m tpugraphs_jax.hlo` converts and shows files. jax is imported only for
functions, jax's stages and HLO text.

module_graph   modules as graphs; `features` describes an instruction, `names` tells its source
sources, text  modules as bytes, from files, text, jax's stages and functions
proto          modules as messages
tuning_data    the data set's tuning records
layout_options  options of layouts for the nodes of a program
calls          calls of functions as functions of arrays alone, with `jit_options` and `state`
jaxprs         programs and equations of jaxprs, and evaluation equation by equation
generations    the TPU generations: peaks, memories, slices
tpu            compiles functions with the TPU compiler; `schedule_dump` has the schedules it writes
tpu_kernels    the kernels that the TPU compiler makes, and their estimated cycles
scalar_operands  integers that Pallas kernels read, from the arguments of a call
loops, work    lengths of loops; operations and bytes of instructions
profiles       profiles of jax.profiler and XProf: times of operations, and HLO modules
buffers        buffers in the large memory over a schedule
"""

from etils import epy

from tpugraphs_jax.hlo.module_graph import featurize, HloGraph, Origin
from tpugraphs_jax.hlo.tuning_data import read_tuning, TuningGraphs

with epy.lazy_api_imports(globals()):  # imports jax
  from tpugraphs_jax.hlo.tpu_kernels import Kernel, kernels

__all__ = ["HloGraph", "Kernel", "Origin", "TuningGraphs", "featurize", "kernels", "read_tuning"]
