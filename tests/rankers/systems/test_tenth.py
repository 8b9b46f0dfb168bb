"""The 10th place: frozen scores, and its two halves against loops."""

from __future__ import annotations

import frozen
import pytest


@pytest.mark.parametrize("case", ["tenth_xla", "tenth_nlp", "tenth_tile"])
def test_scores_and_gradients_are_those_before_it_became_a_file(case):
  frozen.Frozen("tenth", case).check()
