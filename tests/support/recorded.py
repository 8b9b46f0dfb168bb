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

needs_npz = pytest.mark.skipif(not NPZ.is_dir(), reason=f"no released files in {NPZ}")
needs_hlo = pytest.mark.skipif(not HLO.is_dir(), reason=f"no released protobufs in {HLO}")
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason='libtpu is not installed: pip install "jax[tpu]"',
)
