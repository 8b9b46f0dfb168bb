"""Rows of estimates for tests of pages and traces."""

import numpy as np

from tpugraphs_jax.hlo.buffers import Buffer, LiveMemory
from tpugraphs_jax.tuning import costs
from tpugraphs_jax.tuning.schedule import program

BOUNDS = ("products", "vector work", "memory", "loop overhead")


def kernel(name, milliseconds, *, scope="", operation="dot_general", bound="products", **options):
  options = {"where": "model.py:12", "shape": "bf16[8,128]", "calls": 1, **options}
  return costs.KernelCost(
    name, operation, scope, milliseconds=milliseconds, bound=bound, stall=0.1, **options
  )


def row(kernels, *, between=0.0, target="tpu:v6e", **options):
  """A row whose kernels run one after the other, after `between` milliseconds."""
  now, events = between, []
  for cost in kernels:
    if cost.milliseconds:
      events.append(program.Event(now, now + cost.milliseconds, program.CALL, cost.name))
      now += cost.milliseconds
  options = {"milliseconds": now, "events": tuple(events), **options}
  return costs.TargetEstimate(target, kernels=tuple(kernels), **options)


def live(count=100, **options):
  """A memory whose peak has one buffer that is padded."""
  buffer = Buffer(
    "fusion.1", "temporary", "f32[8,2]", 2**30, 64.0, "gather", "LM", "model.py:7", 0, count - 1
  )
  sizes = tuple(2**30 if place == count // 2 else 2**29 for place in range(count))
  names = tuple(f"instruction.{place}" for place in range(count))
  return LiveMemory(names, sizes, count // 2, (buffer,), **options)


def large(count=5000, name="", seed=0):
  """A row of many kernels in many scopes, in a random order of their times."""
  rng = np.random.default_rng(seed)
  kernels = [
    kernel(
      f"fusion.{number}{name}",
      float(time),
      scope=f"LM/Block_{number % 50}/{name or 'Dense'}_{number % 7}",
      operation=f"operation_{number % 11}{name}",
      bound=BOUNDS[number % 4],
      where=f"model.py:{number % 300}{name}",
    )
    for number, time in enumerate(rng.exponential(0.01, count))
  ]
  return row(kernels, between=0.1, live=live())
