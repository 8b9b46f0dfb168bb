"""Marks of tests that need pieces of the released data, or libtpu.

The pieces lie beside the checkout, in `shared/`, or where `TPUGRAPHS_SHARED_DIR` says.
"""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("TPUGRAPHS_SHARED_DIR") or Path(__file__).parents[3] / "shared")
NPZ = ROOT / "data" / "npz"
HLO = ROOT / "hlo"
PROFILES = ROOT / "measured" / "profiles"

# Names of the arrays of a released file, in the order in which they are written.
MEMBERS = {
  "tile": (
    "node_feat node_opcode edge_index config_feat config_runtime config_runtime_normalizers"
  ).split(),
  "layout": (
    "edge_index node_feat node_opcode node_config_feat node_config_ids node_splits config_runtime"
  ).split(),
}

needs_npz = pytest.mark.skipif(not NPZ.is_dir(), reason=f"no released files in {NPZ}")
needs_hlo = pytest.mark.skipif(not HLO.is_dir(), reason=f"no released protobufs in {HLO}")
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason='libtpu is not installed: pip install ".[tpu]"'
)
