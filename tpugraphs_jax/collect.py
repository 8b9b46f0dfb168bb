"""Collections of your programs: their choices of layouts, and labels of choices.

  layouts = collect.choices(step, *arguments)           # groups of operations, with options
  other = collect.apply(step, layouts.choice(numbers))  # the function with layouts chosen

`python -m tpugraphs_jax.collect` labels many choices of many programs and writes
them in the released format.
"""

import sys

from tpugraphs_jax.infra import tasks
from tpugraphs_jax.tuning import collect, measure
from tpugraphs_jax.tuning.choosing import apply, Choice, Choices, choices

__all__ = ["Choice", "Choices", "apply", "choices", "measure"]

if __name__ == "__main__":
  tasks.exit_at_once(collect.main, sys.argv[1:])
