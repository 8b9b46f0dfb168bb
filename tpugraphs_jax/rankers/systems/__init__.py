"""Published systems, each in a file of its own, in the order of its method section.

  gst       Graph Segment Training of TpuGraphs; the 7th place began with its code
  first ... sixth, tenth   places of the competition "Fast or Slow?"
  mlsys21   "A Learned Performance Model for TPUs" (MLSys 2021), kernels alone

`configs/systems` has the settings of each. `system` is their base class. Layers are in `nn`.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):  # importing a module registers its networks
  importlib.import_module(f"{__name__}.{_module.name}")
