"""Configurations that a file measures more than once."""

from __future__ import annotations

import dataclasses

import numpy as np

from tpugraphs_jax.data import distinct
from tpugraphs_jax.graph import OpGraph

POLICIES = ("keep", "first", "min", "mean")


def apply_policy(graph: OpGraph, policy: str) -> OpGraph:
  """One configuration for each set of equal ones.

  Args:
    graph: layout graph.
    policy: `keep` leaves the file as it is (official baseline, Graph Segment
      Training); `first` keeps the first measurement (1st place of the
      competition), `min` the fastest (2nd place), `mean` their mean, rounded to
      nanoseconds. Configurations stay in the order of their first occurrence.
  """
  if policy not in POLICIES:
    raise ValueError(f"data.duplicate_policy is {policy!r}, expected one of "
                     f"{', '.join(POLICIES)}")
  if policy == "keep":
    return graph
  configs = graph.configs
  first, which = distinct.rows(configs.choices)
  runtime = _combine(configs.runtime_ns, first, which, policy)
  return dataclasses.replace(
      graph, configs=dataclasses.replace(configs.subset(first), runtime_ns=runtime))


def _combine(runtime_ns, first, which, policy: str) -> np.ndarray:
  if policy == "first":
    return runtime_ns[first]
  if policy == "min":
    fastest = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(fastest, which, runtime_ns)
    return fastest
  # Above the first measurement, so that the sum cannot overflow and stays exact.
  excess = np.zeros(len(first), np.int64)
  np.add.at(excess, which, runtime_ns - runtime_ns[first][which])
  return runtime_ns[first] + np.rint(excess / np.bincount(which)).astype(np.int64)
