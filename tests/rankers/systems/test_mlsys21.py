"""The model of MLSys 2021: frozen scores, reductions against loops, its features."""

from __future__ import annotations

import frozen
import pytest

VARIANTS = ("", "_per_node", "_lstm", "_transformer", "_gat")


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_and_gradients_are_those_before_it_became_a_file(variant):
  frozen.Frozen("mlsys21", f"mlsys21{variant}").check()
