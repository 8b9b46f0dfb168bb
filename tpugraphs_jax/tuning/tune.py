"""Chooses layouts for a function: labels a few of thousands of choices and keeps the best one.

    choices(f)  ->  candidates  ->  the most promising one  ->  label it  ->  the best, if
     of layouts     thousands       by what is believed         (compile      it is better
                                            ^                    or time)
                                            └── what labels teach ──┘

Compiler options that the caller lists are chosen together with layouts.

`labels` makes a label, `strategies` learns from it and proposes the next choice, and `decide`
compares all labels. Measured labels are made together: a search learns nothing from them. The
compiler's own choice is always tried. It stays unless another choice is better: by the compiler's
estimate, or in alternating pairs of measured times whose bootstrap interval lies below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import operator
import os
import time
import types
from typing import Any

from absl import logging
import jax
import numpy as np

from tpugraphs_jax.graph import LayoutConfigs, OpGraph
from tpugraphs_jax.hlo.calls import Call, check_keywords, check_state
from tpugraphs_jax.infra import console
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.ranker import Ensemble, load, Ranker
from tpugraphs_jax.tuning import compiler, labels, measure, prior, strategies
from tpugraphs_jax.tuning.draw import OptionIndices
from tpugraphs_jax.tuning.label_file import LabelFile
from tpugraphs_jax.tuning.problem import Problem
from tpugraphs_jax.tuning.tuned import changes_of, Tuned

# The model that ships for each target; None is the machine at hand. A prior of the effects of
# changes ships with each model (`prior`).
MODELS = {"tpu:v3": "layout-v3-estimate", None: "layout-cpu-measured"}
CANDIDATES = 2000  # choices that are drawn for a search


def tune(
  function: Callable[..., Any],
  /,
  *args: Any,
  target: str | None = None,
  budget: int = 16,
  model: str | os.PathLike[str] | Ranker | Ensemble | None = None,
  options: Mapping[str, Sequence[Any]] = types.MappingProxyType({}),
  operands: bool = False,
  seed: int = 0,
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
    target: a TPU generation such as `v3` (needs libtpu, no TPU), or None: measure here.
    budget: how many choices are labelled, the compiler's own among them. Where labels are made one
      after the other, another choice replaces one that fails, at most as many as the budget.
    model: of layouts: a working folder, a model file, the name of a model that ships, or a
      loaded one. Without one, the model that ships for the target (`MODELS`), or for TPU v3.
    options: names of compiler options, each with values to choose from; the compiler's default is
      always among them. No other option is changed. The result is compiled with
      `jax.jit(tuned.function, compiler_options=tuned.compiler_options)`.
    operands: whether the orders of operands are chosen too, not of outputs alone.
    seed: of the candidates.
    cache: file of labels by program, `options`, choice, compiler and target. Known labels are read
      from it, and new labels are added, so that a call with a larger budget goes on.
    progress: whether lines on standard error say what takes time, and tell of every label.
    **kwargs: further keyword arguments of the function.

  Returns:
    The best function found; `print` shows changed operations, trials, the worth of a label, and
    what to do.

  Raises:
    ValueError: nothing can be chosen, a budget below 2, the compiler refuses an option, the model
      is not of layouts, the compiler's own choice cannot be labelled, the function changes state
      and is not jitted, the cache is no such file, or (`NoisyMachineError`) the machine is too busy
      to measure on.

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
  if (budget := operator.index(budget)) < 2:
    raise ValueError(
      f"budget is {budget}, expected at least 2: the compiler's own choice and another one"
    )
  check_keywords(function, kwargs, tune)
  call = Call(function, args, kwargs)
  name = labels.Measured.name if target is None else labels.TpuEstimate.name
  label = labels.create(name, target=target, seed=seed)
  with console.working(f"tune {call.__name__}", is_on=progress) as work, label.open() as label:
    work.note(f"tracing {call.__name__}, and compiling it once")
    start = time.monotonic()
    check_state(call)
    check_options(options, label)
    ranker = load_ranker(model, label)
    problem = Problem(call, label, seed=seed, operands=operands, compiler_options=options)
    pool = draw_pool(problem, max(CANDIDATES, budget), has_stage=model is not None)
    work.note(
      f"ordering {len(pool.choices):,} choices for {len(problem.choices.groups)} groups of "
      "operations by a model; a label compiles once more, the first time took "
      f"{time.monotonic() - start:.0f} s"
    )
    search = strategies.learned(pool, ranker, prior_of(label.target))
    file = LabelFile(cache, problem)
    (_measure if label.made_together else _estimate)(search, file, budget, work)
    best, compared = decide(file)
    changes = changes_of(problem, best, file.raw) if any(problem.layouts_of(best)) else []
  order = order_note(ranker, label) if model is None else ""
  return Tuned(problem, best, compared, file.raw, file.errors, len(pool.choices), changes, order)


def draw_pool(problem: Problem, count: int, *, has_stage: bool = True) -> strategies.Pool:
  """The choices that a search proposes from.

  Args:
    problem: whose choices are drawn.
    count: most choices.
    has_stage: whether graphs name their stage of compilation. A model warns of a stage that it was
      not trained on.
  """

  def graph(choices: Sequence[OptionIndices]) -> OpGraph[LayoutConfigs]:
    graph = problem.with_configs(choices)
    return graph if has_stage else dataclasses.replace(graph, stage="")

  drawn = list(itertools.islice(problem.candidates(), count))
  return strategies.Pool(drawn, graph, problem.numbers_of, len(problem.compiler_options))


def order_note(ranker: Ranker | Ensemble, label: labels.Labeller) -> str:
  """A sentence about a model that has learnt other labels; empty for another one."""
  learnt = _learnt(ranker, label)
  return f"The trials are in the order of a model of labels of {learnt}." if learnt else ""


def _learnt(ranker: Any, label: labels.Labeller) -> str:
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


def check_options(options: Mapping[str, Sequence[Any]], label: labels.Labeller) -> None:
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
        why = compiler.reason(error)
        raise ValueError(f"the compiler refuses the option {name}={value!r}: {why}") from None


def load_ranker(model: Any, label: labels.Labeller) -> Ranker | Ensemble:
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
        f"{member!r} has learnt labels of {learnt}, and tune labels the {label.noun}: its order is "
        "worth less"
      )
  return ranker


def _measure(search: strategies.Search, file: LabelFile, budget: int, work: console.Work) -> None:
  """Labels the first choices of a search together; the search learns nothing."""
  choices = list(itertools.islice(search, budget))
  work.note(f"measuring {len(choices)} choices in turn, after all are compiled")
  with console.working(_title(file, 1, budget)):
    file.label_choices(choices)
  for place, numbers in enumerate(choices, 1):
    work.note(_line(file, place, budget, numbers))
    if file.problem.default in file.errors:
      return


def _estimate(search: strategies.Search, file: LabelFile, budget: int, work: console.Work) -> None:
  """Labels the choices that a search proposes, and tells it the label of each."""
  numbers = next(search)
  for place in itertools.count(1):
    most = min(budget + len(file.errors), 2 * budget)
    if place > most:
      return
    if place > 1:
      try:
        with console.working("ordering the choices that are left"):
          numbers = search.send(file.ratio(numbers))
      except StopIteration:  # every choice was tried
        return
    with console.working(_title(file, place, most)):
      file.label_choices([numbers])
    work.note(_line(file, place, most, numbers))
    if file.problem.default in file.errors:
      return


def _title(file: LabelFile, place: int, most: int) -> str:
  """What takes time while a choice is labelled."""
  size = file.problem.graph.num_nodes
  return f"label {place} of {most}: compiling a program of {size:,} instructions"


def _line(file: LabelFile, place: int, most: int, numbers: OptionIndices) -> str:
  """A line of progress about a choice that was labelled."""
  failed = file.errors.get(numbers)
  found = f"failed: {failed}" if failed else f"{file.ratio(numbers):.3f} of the compiler's own"
  changed = file.problem.describe(numbers)
  return f"label {place} of {most}: {found}; groups changed: {changed}"


def decide(file: LabelFile) -> tuple[OptionIndices, tuple[float, float, float] | None]:
  """The best of the choices that were tried, or the compiler's own choice.

  Returns:
    The choice. For measured times also the median ratio of its run times to those of the compiler's
    own choice with the ends of its 95 % bootstrap interval, else None.

  Raises:
    ValueError: the compiler's own choice has no label.
  """
  problem, label = file.problem, file.problem.label
  default = problem.default
  if default in file.errors:
    why = file.errors[default]
    raise ValueError(f"{problem.name}: the compiler's own choice cannot be labelled: {why}")
  best = min(file.raw, key=file.ratio)  # the first of equals: the default
  if not isinstance(label, labels.Measured) or best == default:
    return (best if file.ratio(best) <= 1 - label.min_gain else default), None
  first, second = problem.apply(default), problem.apply(best)
  options, arrays = problem.compiler_options_of(best), problem.call.arrays
  with console.working("comparing the best choice with the compiler's own"):
    compared = measure.compare(first, second, arrays, options, seed=problem.seed)
  return (best if compared[2] < 1 else default), compared
