"""Where pieces of the released data lie, for the tests that need them.

They are beside the checkout, in `shared/`, or where `TPUGRAPHS_SHARED_DIR` says.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("TPUGRAPHS_SHARED_DIR") or Path(__file__).parents[2] / "shared")
NPZ = ROOT / "data" / "npz"
HLO = ROOT / "hlo"
INDICES = ROOT / "eval_indices"

needs_npz = pytest.mark.skipif(not NPZ.is_dir(), reason=f"no released files in {NPZ}")
needs_hlo = pytest.mark.skipif(not HLO.is_dir(), reason=f"no records of the data set in {HLO}")
needs_indices = pytest.mark.skipif(not INDICES.is_dir(), reason=f"no indices in {INDICES}")
