"""Chooses layouts for a function: labels a few of thousands of choices and keeps the best one.

    choices(f)  ->  candidates  ->  the most promising one  ->  label it  ->  the best, if
     of layouts     thousands       by what is believed         (compile      it is better
                                            ^                    or time)
                                            └── what labels teach ──┘

Compiler options that the caller lists are chosen together with layouts.

`labels` makes a label, `strategies` learns from it and proposes the next choice, and `_decide`
compares all labels. Measured labels are made together: a search learns nothing from them. The
compiler's own choice is always tried. It stays unless another choice is better: by the compiler's
estimate, or in alternating pairs of measured times whose bootstrap interval lies below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import operator
import os
from pathlib import Path
import time
import types
from typing import Any

from absl import logging
import jax
import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.hlo import calls
from tpugraphs_jax.infra import console
from tpugraphs_jax.infra.console import Table
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.ranker import Ensemble, load, Ranker
from tpugraphs_jax.tuning import choosing, labels, layouts, measure, prior, strategies
from tpugraphs_jax.tuning.draw import Numbers
from tpugraphs_jax.tuning.label_file import LabelFile
from tpugraphs_jax.tuning.labels import Raw
from tpugraphs_jax.tuning.page import Page
from tpugraphs_jax.tuning.problem import Problem

# The model that ships for each target; None is the machine at hand. A prior of the effects of
# changes ships with each model (`prior`).
MODELS = {"tpu:v3": "layout-v3-estimate", None: "layout-cpu-measured"}
STRATEGIES = ("learned", "model")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tuned(Page):
  """A function with the best choice that was labelled, and the record of the search.

  Attributes:
    function: with the best choice; the function itself where no layout was changed. A jitted
      function stays so: with its donated and static arguments, shardings and state, and with the
      compiler options of the choice. Call another one under `jax.jit`.
    numbers: the option of every group, then of every compiler option; all 0 for the compiler's own
      choice.
    ratio: label of `numbers` divided by the label of the compiler's own choice; 1 if that choice
      stays.
    compared: for measured times, the median ratio of run times and its 95 % bootstrap interval,
      between the choice with the least time and the compiler's own choice.
    raw: the raw numbers of every choice that was labelled.
    errors: the reason of every choice that could not be compiled or compared, or gave other
      outputs.
    candidates: number of choices that were drawn for the search.
    label: how choices were labelled, and what it leaves out (`gap`).
    changes: of operations, against the compiler's own choice.
    problem: the function before and its choices.
    order: a sentence about the model that ordered the trials; empty for one of such labels.
  """

  function: Callable[..., Any]
  numbers: Numbers
  ratio: float
  compared: tuple[float, float, float] | None
  raw: dict[Numbers, Raw]
  errors: dict[Numbers, str]
  candidates: int
  label: labels.Label
  changes: list[layouts.Change]
  problem: Problem
  order: str = ""

  @property
  def tried(self) -> dict[Numbers, int]:
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
    name = self.problem.name
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
    return [" ".join(filter(None, [self.label.worth, self.order])), self.decision]

  def _tables(self) -> list[Table]:
    """The changes of operations, and all trials."""
    default = self.tried[self.problem.default]
    trials = sorted(self.tried.items(), key=lambda item: item[1])
    head = [f"{self.label.what} / own", "groups changed"]
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
      "label": self.label.what,
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
      f"{counts}the best takes {self.ratio:.3f} {between}of the {self.label.what} of the "
      f"compiler's own choice, with layouts chosen for {sum(number > 0 for number in numbers)} of "
      f"{len(numbers)} groups{values}{self.problem.left_out}"
    )

  def _why(self) -> str:
    """Why the compiler's own choice stays."""
    if len(self.raw) == 1 and self.errors:
      return f"every other choice failed: {next(iter(self.errors.values()))}"
    default, least = self.tried[self.problem.default], min(self.tried.values())
    if least == default:
      return f"none had a lower {self.label.what}"
    if not self.compared:
      return (
        f"the best other one took {least / default:.3f} of its {self.label.what}, and gains below "
        f"{self.label.margin:.0%} are no gain"
      )
    return (
      f"the best other one took {least / default:.3f} of its time in the trials, and "
      "{:.3f} ({:.3f} to {:.3f}) in alternating pairs".format(*self.compared)
    )

  def _own_and_best(self) -> list[Raw]:
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


def _time_of_group(raw: Raw, group: int) -> int:
  """Picoseconds of the kernels that come from a group, of the raw numbers of a choice."""
  return sum(kernel["picoseconds"] for kernel in raw["kernels"] if kernel["group"] == group)


def tune(
  function: Callable[..., Any],
  /,
  *args: Any,
  model: str | os.PathLike[str] | Ranker | Ensemble | None = None,
  target: str | None = None,
  budget: int = 16,
  strategy: str = "learned",
  candidates: int = 2000,
  options: Mapping[str, Sequence[Any]] = types.MappingProxyType({}),
  seed: int = 0,
  operands: bool = False,
  cache: str | os.PathLike[str] | None = None,
  progress: bool = True,
  **kwargs: Any,
) -> Tuned:
  """Chooses layouts and compiler options: labels the few most promising of many choices.

  For a TPU target each label compiles the function once, in this process and without a TPU. A
  measured label runs it: arrays among the arguments are used as given, and shapes become random
  arrays.

  Args:
    function: as for `collect.choices`.
    *args: its example arguments, arrays or `jax.ShapeDtypeStruct`. Whatever is no array is part of
      the program.
    model: of layouts: a working folder, a model file, the name of a model that ships, or a
      loaded one. Without one, the model that ships for the target (`MODELS`), or for TPU v3.
    target: a TPU generation such as `v3` (needs libtpu, no TPU), or None: measure here.
    budget: how many choices are labelled, the compiler's own among them. Where labels are made one
      after the other, another choice replaces one that fails, at most as many as the budget.
    strategy: of search (`strategies`): `learned`, or for comparison `model`.
    candidates: how many choices are drawn for the search, at least `budget`.
    options: names of compiler options, each with values to choose from; the compiler's default is
      always among them. No other option is changed. The result is compiled with
      `jax.jit(tuned.function, compiler_options=tuned.compiler_options)`.
    seed: of the candidates.
    operands: whether the orders of operands are chosen too, not of outputs alone.
    cache: file of labels by program, `options`, choice, compiler and target. Known labels are read
      from it, and new labels are added, so that a call with a larger budget goes on.
    progress: whether lines on standard error say what takes time, and tell of every label.
    **kwargs: further keyword arguments of the function.

  Returns:
    The best function found; `print` shows changed operations, trials, the worth of a label, and
    what to do.

  Raises:
    ValueError: nothing can be chosen, a budget below 2, no such strategy, the compiler refuses an
      option, the model is not of layouts, the compiler's own choice cannot be labelled, the
      function changes state and is not jitted, the cache is no such file, or (`NoisyMachineError`)
      the machine is too busy to measure on.

  Examples:
    >>> import jax
    >>> def layer(x, w):
    ...   return jax.lax.conv(x, w, window_strides=(1, 1), padding="SAME")
    >>> x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4, 9, 9), (6, 4, 3, 3)))
    >>> tuned = tune(layer, x, w, budget=3, progress=False)  # measured on this machine
    >>> len(tuned.tried), tuned.ratio <= 1
    (3, True)
    >>> fast = jax.jit(tuned.function)
  """
  budget, candidates = operator.index(budget), operator.index(candidates)
  if budget < 2:
    raise ValueError(
      f"budget is {budget}, expected at least 2: the compiler's own choice and another one"
    )
  if strategy not in STRATEGIES:
    raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)}")
  name = labels.Measured.name if target is None else labels.TpuEstimate.name
  label = labels.create(name, target=target, seed=seed)
  what = getattr(function, "__name__", "the function")
  with console.working(f"tune {what}", is_on=progress) as work, label.opened() as label:
    work.note(f"tracing {what}, and compiling it once")
    start = time.monotonic()
    calls.check_state(calls.Call(function, args, kwargs))
    ranker = _ranker(model, label)
    _check_options(options, label)
    problem = Problem(
      function, args, label, kwargs=kwargs, seed=seed, operands=operands, compiler_options=options
    )
    drawn = list(itertools.islice(problem.candidates(), max(candidates, budget)))
    work.note(
      f"ordering {len(drawn):,} choices for {len(problem.choices.groups)} groups of operations by "
      f"a model; a label compiles once more, the first time took {time.monotonic() - start:.0f} s"
    )
    pool = strategies.Pool(drawn, _graphs(problem, model), problem.numbers_of, len(options))
    file = LabelFile(cache, problem)
    search = strategies.model(pool, ranker)
    if strategy == "learned":
      search = strategies.learned(pool, ranker, prior_of(label.target))
    _label(search, file, budget, work)
    order = _order(ranker, label) if model is None else ""
    return _decide(function, problem, file, candidates=len(drawn), order=order)


def _graphs(problem: Problem, model: Any) -> Callable[[Sequence[Numbers]], OpGraph[LayoutConfigs]]:
  """Makes graphs with choices; for the model that ships without the stage, of which it warns."""
  if model is not None:
    return problem.with_configs
  return lambda choices: dataclasses.replace(problem.with_configs(choices), stage="")


def _order(ranker: Ranker | Ensemble, label: labels.Label) -> str:
  """A sentence about a model that has learnt other labels; empty for another one."""
  learnt = _learnt(ranker, label)
  return f"The trials are in the order of a model of labels of {learnt}." if learnt else ""


def _learnt(ranker: Any, label: labels.Label) -> str:
  """The target or device of whose labels a model has learnt; empty where it is the label's."""
  of_labels = getattr(ranker, "about", {}).get("labels")
  if not of_labels or (of_labels.get("target") or None) == label.target:
    return ""
  return of_labels.get("target") or "times measured on a device"


def prior_of(target: str | None) -> prior.Prior:
  """The prior that ships for labels of a target; every TPU has the prior of TPU v3."""
  return prior.read(model_file.SHIPPED / f"{_shipped(target)}.prior.json")


def _shipped(target: str | None) -> str:
  """The model that ships for a target. A TPU without one has the model of TPU v3."""
  return MODELS[target if target in MODELS else "tpu:v3"]


def _check_options(options: Mapping[str, Sequence[Any]], label: labels.Label) -> None:
  """Refuses (ValueError) options or values that the compiler does not take."""
  if not isinstance(options, Mapping):
    raise ValueError(f"options is {options!r}, expected a dictionary from names to lists of values")
  for name, values in options.items():
    if not isinstance(values, (list, tuple)) or not values:
      raise ValueError(f"options: {name} is {values!r}, expected a list of values to choose from")
    for value in values:
      if not isinstance(value, (bool, int, float, str)):
        raise ValueError(
          f"options: {name} has {value!r}, expected a truth value, a number or a text"
        )
      try:
        label.compile(lambda x: x, (np.float32(0),), {name: value})
      except (jax.errors.JaxRuntimeError, TypeError) as error:
        why = labels.reason(error)
        raise ValueError(f"the compiler refuses the option {name}={value!r}: {why}") from None


def _label(search: strategies.Search, file: LabelFile, budget: int, work: console.Work) -> None:
  """Labels the choices that a search proposes, the compiler's own choice first.

  Args:
    search: proposes them.
    file: makes labels, or has them, and keeps them.
    budget: how many.
    work: takes a line about each.
  """
  compiling = f"a program of {file.problem.graph.num_nodes:,} instructions"
  together = file.problem.label.made_together  # the search then does not learn from labels
  asked = list(itertools.islice(search, budget if together else 1))
  if together:
    work.note(f"measuring {len(asked)} choices in turn, after all are compiled")
  for place in itertools.count():
    most = budget if together else min(budget + len(file.errors), 2 * budget)
    if place == most:
      break
    if place == len(asked):
      try:
        with console.working("ordering the choices that are left"):
          asked.append(search.send(file.ratio(asked[-1])))
      except StopIteration:  # every choice was tried
        break
    if place == 0 or not together:
      with console.working(f"label {place + 1} of {most}: {compiling}"):
        file.label_choices(asked[place:])
    work.note(_told(place, most, asked[place], file))
    if asked[0] in file.errors:
      break  # the compiler's own choice, to which the others are compared


def _told(place: int, most: int, numbers: Numbers, file: LabelFile) -> str:
  """A line of progress."""
  failed = file.errors.get(numbers)
  said = f"failed: {failed}" if failed else f"{file.ratio(numbers):.3f} of the compiler's own"
  said += f"; groups changed: {file.problem.describe(numbers)}"
  return f"label {place + 1} of {most}: {said}"


def _ranker(model: Any, label: labels.Label) -> Ranker | Ensemble:
  """The model to rank with; warns if a given one was trained on labels of another target."""
  is_given = model is not None
  model = model if is_given else _shipped(label.target)
  ranker = load(model) if isinstance(model, (str, os.PathLike)) else model
  if not hasattr(ranker, "collection"):
    raise ValueError(f"model is {ranker!r}, expected a model, or the place of one")
  if (kind := ranker.collection.kind) != "layout":
    raise ValueError(f"the model ranks {kind} configurations, expected one of layouts")
  for member in ranker.rankers if isinstance(ranker, Ensemble) else [ranker]:
    if is_given and (learnt := _learnt(member, label)):
      logging.warning(
        f"{member!r} has learnt labels of {learnt}, and tune labels the {label.what}: its order is "
        "worth less"
      )
  return ranker


def _decide(
  function: Callable[..., Any], problem: Problem, file: LabelFile, *, candidates: int, order: str
) -> Tuned:
  """The best of the choices that were tried, or the compiler's own choice."""
  default, label = problem.default, problem.label
  if default in file.errors:
    why = file.errors[default]
    raise ValueError(f"{problem.name}: the compiler's own choice cannot be labelled: {why}")
  value = {numbers: label.value(raw) for numbers, raw in file.raw.items()}
  best, compared = min(value, key=value.__getitem__), None  # the first of equals: the default
  ratio = value[best] / value[default]
  if isinstance(label, labels.Measured) and best != default:
    first, second = problem.apply(default), problem.apply(best)
    options, arrays = problem.compiler_options_of(best), problem.call.arrays
    with console.working("comparing the best choice with the compiler's own"):
      compared = measure.compare(first, second, arrays, options, seed=problem.seed)
    ratio = compared[0]
  is_gain = ratio <= 1 - label.margin if compared is None else compared[2] < 1
  if not is_gain:
    best, ratio = default, 1.0
  chosen, changes = problem.layouts_of(best), []
  if any(chosen):
    changes = _changes(problem, best, file.raw)
  trace = problem.call.trace
  if any(chosen) or any(best) and trace.jit or trace.rest.changed:
    evaluate = functools.partial(choosing.evaluate, choice=problem.choices.choice(chosen))
    function = calls.Version(function, evaluate, problem.compiler_options_of(best))
  return Tuned(
    function,
    best,
    ratio,
    compared,
    file.raw,
    file.errors,
    candidates,
    label,
    changes,
    problem,
    order,
  )


def _changes(problem: Problem, best: Numbers, tried: dict[Numbers, Raw]) -> list[layouts.Change]:
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
