"""Data sets of one's own: programs, their layout choices, and labels for them.

  layouts = collect.choices(step, *arguments)           # groups of operations, with options
  other = collect.apply(step, layouts.choice(numbers))  # the function with layouts chosen

`python -m tpugraphs_jax.collect` labels many choices of many programs and writes
them in the released format.
"""

from tpugraphs_jax.collect.choosing import apply, Choice, Choices, choices

__all__ = ["Choice", "Choices", "apply", "choices"]
