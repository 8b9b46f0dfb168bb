"""Published systems, one file each. A file reads in the order of the system's method section.

  gst                      Graph Segment Training of TpuGraphs, and the 7th place
  first ... sixth, tenth   places of the competition "Fast or Slow?"
  s2gnn                    "Spatio-Spectral Graph Neural Networks" (NeurIPS 2024)
  mlsys21                  "A Learned Performance Model for TPUs" (MLSys 2021), for kernels

Settings are in `configs/systems`, the base class in `system`, layers in `nn`. To add a system, copy
`fourth.py` for layouts or `mlsys21.py` for kernels, and its settings.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):  # importing a module registers its networks
  importlib.import_module(f"{__name__}.{_module.name}")
