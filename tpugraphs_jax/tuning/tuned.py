"""The result of `tune`: the function with the best choice, what was tried, and what to do."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np

from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.tuning import choosing, labels, layouts
from tpugraphs_jax.tuning.draw import OptionIndices
from tpugraphs_jax.tuning.labels import kernels, LabelRecord
from tpugraphs_jax.tuning.page import Page
from tpugraphs_jax.tuning.problem import Problem


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tuned(Page):
  """A function with the best choice that was labelled, and the record of the search.

  Attributes:
    problem: the function before, its choices, and how these were labelled.
    numbers: the option of every group, then of every compiler option; all 0 for the compiler's own
      choice.
    compared: for measured times, the median ratio of run times and its 95 % bootstrap interval,
      between the choice with the least time and the compiler's own choice.
    raw: the raw numbers of every choice that was labelled.
    errors: the reason of every choice that could not be compiled or compared, or gave other
      outputs.
    candidates: number of choices that were drawn for the search.
    changes: of operations, against the compiler's own choice.
    order: a sentence about the model that ordered the trials; empty for one of such labels.
  """

  problem: Problem
  numbers: OptionIndices
  compared: tuple[float, float, float] | None
  raw: dict[OptionIndices, LabelRecord]
  errors: dict[OptionIndices, str]
  candidates: int
  changes: list[layouts.Change]
  order: str = ""

  @functools.cached_property
  def function(self) -> Callable[..., Any]:
    """The function with the best choice; the function itself where no layout was changed.

    A jitted function stays so: with its donated and static arguments, shardings and state, and with
    the compiler options of the choice. Call another one under `jax.jit`.
    """
    return self.problem.rewrite(self.numbers)

  @property
  def ratio(self) -> float:
    """Label of the best choice / label of the compiler's own choice; 1 if that choice stays."""
    if self.keeps_default:
      return 1.0
    if self.compared:
      return self.compared[0]
    return self.tried[self.numbers] / self.tried[self.problem.default]

  @property
  def label(self) -> labels.Labeller:
    """How choices were labelled."""
    return self.problem.label

  @property
  def tried(self) -> dict[OptionIndices, int]:
    """The label of every choice that was labelled, the compiler's own choice first."""
    return {numbers: self.label.value(raw) for numbers, raw in self.raw.items()}

  @property
  def failed(self) -> int:
    """How many choices failed."""
    return len(self.errors)

  @property
  def keeps_default(self) -> bool:
    """Whether the compiler's own choice stays."""
    return not any(self.numbers)

  @property
  def compiler_options(self) -> dict[str, Any]:
    """The compiler options of the choice, for `jax.jit(function, compiler_options=...)`."""
    return self.problem.compiler_options_of(self.numbers)

  @property
  def program(self) -> layouts.TunedProgram:
    """The program as the compiler saw it, with the changes of layouts and the times of nodes."""
    return layouts.TunedProgram(
      self.problem.graph, self.changes, self._node_times(), self._summary()
    )

  def __repr__(self) -> str:
    return f"<Tuned {self.problem.name}: {self._summary()}>"

  @property
  def decision(self) -> str:
    """What to do with the result, and how."""
    name, function = self.problem.name, self.problem.call.function
    if inspect.ismethod(function):  # as it can be typed, but for the options of its object
      name = f"{type(function.__self__).__name__}(...).{name}"
    if self.keeps_default:
      return f"Leave it: keep {name} as it is."
    is_jitted = self.problem.call.trace.jit is not None
    call = f'tpugraphs_jax.apply({name}, "layouts.json")'
    if self.compiler_options:
      options = "compiler_options=tuned.compiler_options"
      call = f"{call[:-1]}, {options})" if is_jitted else f"jax.jit({call}, {options})"
    elif not is_jitted:
      call = f"jax.jit({call})"
    return (
      f"Apply it, for a gain of {1 - self.ratio:.1%}: "
      f'tuned.save("layouts.json"), and where {name} runs: fast = {call}'
    )

  def _title(self) -> str:
    return f"{self.problem.name}: choices of layouts"

  def _kind(self) -> str:
    return super()._kind() if self.label.target else "measured on this machine"

  def _verdict(self) -> list[str]:
    return [self.decision, self._summary()]

  def _notes(self) -> list[str]:
    return [" ".join(filter(None, [self.label.caveat, self.order])), self.decision]

  def _tables(self) -> list[Table]:
    """The changes of operations, and all trials."""
    default = self.tried[self.problem.default]
    trials = sorted(self.tried.items(), key=lambda item: item[1])
    head = [f"{self.label.noun} / own", "groups changed"]
    rows = [[f"{value / default:.3f}", self.problem.describe(numbers)] for numbers, value in trials]
    changes = self.program.table(self._other_times() if self.changes else ())
    return [changes, Table(head, rows)]

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the choice to a file, with which `tpugraphs_jax.apply` makes the function again.

    The file holds the program too, which `python -m tpugraphs_jax.view` shows.
    """
    choice = self.problem.choices.choice(self.problem.layouts_of(self.numbers))
    about = {
      "compiler_options": self.compiler_options,
      "name": self.problem.name,
      "label": self.label.noun,
      "ratio": self.ratio,
      **self.label.versions(),
    }
    layouts.save(Path(path), self.problem.call, choice, about, self.program)

  def _summary(self) -> str:
    what = "choices" if self.problem.compiler_options else "layouts"
    counts = f"{len(self.raw)} of {self.candidates:,} {what} tried, {self.failed} failed: "
    if self.keeps_default:
      return f"{counts}the compiler's own choice stays, {self._why()}{self.problem.left_out}"
    between = ""
    if self.compared:
      between = "({:.3f} to {:.3f}, in alternating pairs) ".format(*self.compared[1:])
    numbers = self.problem.layouts_of(self.numbers)
    values = "".join(f", {name}={value}" for name, value in self.compiler_options.items())
    return (
      f"{counts}the best takes {self.ratio:.3f} {between}of the {self.label.noun} of the "
      f"compiler's own choice, with layouts chosen for {sum(number > 0 for number in numbers)} of "
      f"{len(numbers)} groups{values}{self.problem.left_out}"
    )

  def _why(self) -> str:
    """Why the compiler's own choice stays."""
    if len(self.raw) == 1 and self.errors:
      return f"every other choice failed: {next(iter(self.errors.values()))}"
    default, least = self.tried[self.problem.default], min(self.tried.values())
    if least == default:
      return f"none had a lower {self.label.noun}"
    if not self.compared:
      return (
        f"the best other one took {least / default:.3f} of its {self.label.noun}, and gains below "
        f"{self.label.min_gain:.0%} are no gain"
      )
    return (
      f"the best other one took {least / default:.3f} of its time in the trials, and "
      "{:.3f} ({:.3f} to {:.3f}) in alternating pairs".format(*self.compared)
    )

  def _own_and_best(self) -> list[LabelRecord]:
    """The raw numbers of the compiler's own choice, and of the best choice."""
    return [self.raw[self.problem.default], self.raw[self.numbers]]

  def _node_times(self) -> dict[int, tuple[int, int]]:
    """Picoseconds of configurable nodes, before and after, for a TPU."""
    if not self.label.target:
      return {}
    of_nodes: dict[int, tuple[int, int]] = {}
    for group, nodes in self.problem.nodes_of_groups().items():
      before, after = (_time_of_group(raw, group) // len(nodes) for raw in self._own_and_best())
      of_nodes |= dict.fromkeys(nodes, (before, after))
    return of_nodes

  def _other_times(self) -> list[list[str]]:
    """A row for all other operations, so that the times add up to the total."""
    if not self.label.target:
      return []
    totals = [self.label.value(raw) for raw in self._own_and_best()]
    rest = np.subtract(totals, np.sum([change.picoseconds for change in self.changes], axis=0))
    return [
      ["", "all other kernels, and between kernels", "", "", "", layouts.from_to(*rest)],
      ["", "total", "", "", "", layouts.from_to(*totals)],
    ]


def _time_of_group(raw: LabelRecord, group: int) -> int:
  """Picoseconds of the kernels that come from a group, of the raw numbers of a choice."""
  return sum(kernel["picoseconds"] for kernel in kernels(raw) if kernel["group"] == group)


def changes_of(
  problem: Problem, best: OptionIndices, tried: dict[OptionIndices, LabelRecord]
) -> list[layouts.Change]:
  """The changes of the best choice against the compiler's own, in the order of the groups."""
  orders, nodes = problem.own_orders(), problem.nodes_of_groups()
  estimates = [tried[problem.default], tried[best]] if problem.label.target else []
  changes = []
  for place, (group, number) in enumerate(zip(problem.choices.groups, best)):
    if number:
      times = tuple(_time_of_group(raw, place) for raw in estimates)
      after = tuple(
        choosing.minor_to_major(order, len(shape)) if order else ()
        for order, shape in zip(group.options[number], group.shapes)
      )
      before, lines = orders[place] or (), problem.lines(place)
      changes.append(layouts.Change(nodes[place], str(group), lines, before, after, times))
  return changes
