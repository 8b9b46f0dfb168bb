"""The 4th place: frozen scores, edges of configurable consumers, and their bilinear pooling."""

from __future__ import annotations

import frozen


def test_scores_and_gradients_are_those_before_it_became_a_file():
  frozen.Frozen("fourth", "fourth").check()
