"""Choosing layouts for a function, with made-up labels or labels of this machine."""

import dataclasses
import itertools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import recorded
from tests.support.hlo_modules import ARGS, network
import tpugraphs_jax
from tpugraphs_jax import datasets, hlo
from tpugraphs_jax.hlo import sources, tpu
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.hlo.generations import GENERATIONS
from tpugraphs_jax.rankers.tables.family import TablesFamily
from tpugraphs_jax.tuning import labels, layouts, measure, tune
from tpugraphs_jax.tuning.problem import node_options, Problem


def _drawn(problem, count):
  return list(itertools.islice(problem.candidates(), count))


def _arrays():
  rng = np.random.default_rng(0)
  return tuple(jnp.asarray(rng.normal(size=arg.shape), arg.dtype) for arg in ARGS)


@pytest.fixture(scope="module")
def problem():
  return Problem(Call(network, ARGS), labels.Measured(), operands=True)


class Oracle:
  """A ranker whose score of a configuration is the given cost of its option numbers."""

  collection = datasets.Collection("layout:own:tried")

  def __init__(self, problem, cost, *, tables=False):
    self.problem, self.cost, self.asked = problem, cost, []
    self.family = TablesFamily.__new__(TablesFamily) if tables else None
    self.about = {"labels": {"label": "measured", "platform": "cpu"}}

  def scores(self, graphs):
    self.asked = self.problem.numbers_of(graphs[0])
    return [np.array([self.cost(numbers) for numbers in self.asked])]

  def propose(self, graph, n, *, near):
    assert near == 0 and (graph.configs.decode(np.array([0])) == -1).all()  # the compiler's own
    every = sorted(itertools.product(*self.problem.options), key=self.cost)[:n]
    proposed = self.problem.with_configs([tuple(map(int, numbers)) for numbers in every])
    return dataclasses.make_dataclass("Proposals", ["graph"])(proposed)


def _labelled_by(monkeypatch, cost, failing=()):
  """Replaces labels by costs; returns the list of candidates labelled from now on."""
  tried = []

  def label_records(problem, candidates, begin):
    for numbers in candidates:
      tried.append(numbers)
      error = ValueError("out of\nmemory") if numbers in failing else None
      yield numbers, error or {"seconds": [cost(numbers) / 1e9]}

  monkeypatch.setattr(Problem, "label_records", label_records)
  return tried


def _cost(numbers):
  return 100 - 7 * numbers[0] + 11 * sum(numbers[1:])


def test_configurations_of_the_graph_and_option_numbers_are_the_same_thing(problem):
  drawn = _drawn(problem, 60)
  assert drawn[0] == (0,) * len(problem.options) and len(set(drawn)) == 60
  graph = problem.with_configs(drawn)
  assert len(graph.configs) == 60
  assert problem.numbers_of(graph) == drawn
  nodes = node_options(problem.graph, problem.choices)
  for config, numbers in zip(graph.configs.decode(np.arange(60)), drawn):
    for row, node in zip(config, nodes, strict=True):
      np.testing.assert_array_equal(row, node.rows[numbers[node.group]])


def _new_ones_first(drawn):
  """By cost, the cheapest choice of every set of changed groups; of equal costs the first."""
  of_cost, of_groups = {_cost(drawn[0]): drawn[0]}, {}
  for numbers in sorted(drawn, key=_cost):
    if of_cost.setdefault(_cost(numbers), numbers) == numbers and any(numbers):
      of_groups.setdefault(tuple(np.flatnonzero(numbers)), numbers)
  return list(of_groups.values())


@pytest.mark.parametrize("tables", [False, True])
def test_the_first_of_a_models_order_are_tried_and_the_best_trial_wins(
  monkeypatch, problem, tables
):
  tried = _labelled_by(monkeypatch, _cost)
  monkeypatch.setattr(measure, "compare", lambda *args, **options: (0.9, 0.85, 0.95))
  ranker = Oracle(problem, _cost, tables=tables)
  found = tune.tune(network, *ARGS, model=ranker, budget=5, operands=True)
  assert len(tried) == 5 and tried[0] == (0,) * len(problem.options)
  assert found.candidates == len(_drawn(problem, tune.CANDIDATES)) <= len(ranker.asked)
  if not tables:
    assert set(_new_ones_first(ranker.asked)[:2]) <= set(tried)
  best = min(tried, key=_cost)
  assert found.numbers == best and not found.keeps_default
  if tables:  # proposals reach choices that were not drawn
    every = itertools.product(*problem.options)
    assert _cost(best) == min(map(_cost, every))
  assert found.ratio == 0.9 and found.compared == (0.9, 0.85, 0.95)
  assert "takes 0.900 (0.850 to 0.950, in alternating pairs) of the measured time" in str(found)
  assert [change.operation for change in found.changes] == [
    str(group) for group, number in zip(problem.choices.groups, best) if number
  ]
  for change in found.changes:
    assert change.lines[0].startswith("hlo_modules.py:") and not change.picoseconds
    assert f"{change.operation}  " in str(found) and change.lines[0] in str(found)
  args = _arrays()
  np.testing.assert_allclose(
    jax.jit(found.function)(*args), jax.jit(network)(*args), rtol=1e-5, atol=1e-5
  )


def test_an_order_that_is_the_compilers_own_is_shown_as_fixed():
  changes = [
    layouts.Change([0], "dot", ["net.py:3"], before, ((0, 1), (), ()), ())
    for before in ((1, 0), (0, 1), ())
  ]
  graph = hlo.featurize(lambda x: x @ x, jnp.ones((2, 2)))
  rows = layouts.TunedProgram(graph, changes, {}, "tried").table().rows
  assert [row[4] for row in rows] == ["{1,0} -> {0,1}", "{0,1} fixed", "? -> {0,1}"]


@pytest.mark.parametrize(
  "label, interval",
  [
    (lambda numbers: 100 + sum(numbers), None),  # nothing is better
    (lambda numbers: 100, None),  # everything is as good
    (_cost, (0.98, 0.93, 1.01)),  # better, but not beyond doubt
  ],
)
def test_the_default_stays_unless_another_choice_is_really_better(
  monkeypatch, problem, label, interval
):
  _labelled_by(monkeypatch, label)
  monkeypatch.setattr(measure, "compare", lambda *args, **options: interval)
  found = tune.tune(network, *ARGS, model=Oracle(problem, _cost), budget=4, operands=True)
  assert found.keeps_default and found.function is network and found.ratio == 1
  assert "the compiler's own choice stays" in str(found)
  if interval is None:
    assert "none had a lower measured time" in str(found)
  else:  # the table below has a lower time
    assert "0.980 (0.930 to 1.010) in alternating pairs" in str(found)
    ratio = min(found.tried.values()) / 100
    assert f"took {ratio:.3f} of its time in the trials" in str(found)


def test_failures_have_their_reason_and_a_default_that_fails_is_an_error(
  monkeypatch, capsys, problem
):
  options = dict(model=Oracle(problem, _cost), budget=4, operands=True)
  tried = _labelled_by(monkeypatch, lambda numbers: 100 + sum(numbers))
  tune.tune(network, *ARGS, **options)
  _labelled_by(monkeypatch, lambda numbers: 100 + sum(numbers), failing=[tried[1]])
  found = tune.tune(network, *ARGS, **options)
  assert found.failed == 1 and len(found.tried) == 3
  assert found.errors == {tried[1]: "out of"}  # the first line
  assert "label 2 of 4: failed: out of; groups changed" in capsys.readouterr().err
  _labelled_by(monkeypatch, _cost, failing=[(0,) * len(problem.options)])
  with pytest.raises(ValueError, match="own choice cannot be labelled: out of$"):
    tune.tune(network, *ARGS, **options)


def test_impossible_arguments_of_tune_are_refused(problem):
  oracle = Oracle(problem, _cost)
  with pytest.raises(ValueError, match="budget"):
    tpugraphs_jax.tune(network, *ARGS, model=oracle, budget=1)
  with pytest.raises(ValueError, match="layout"):
    tpugraphs_jax.tune(jnp.sin, ARGS[0], model=oracle)
  oracle.collection = datasets.Collection("tile:xla")
  with pytest.raises(ValueError, match="tile"):
    tpugraphs_jax.tune(network, *ARGS, model=oracle)


def test_a_line_tells_of_every_label_and_the_file_of_labels_continues_a_search(
  monkeypatch, capsys, tmp_path
):
  outputs = Problem(Call(network, ARGS), labels.Measured())
  tried = _labelled_by(monkeypatch, lambda numbers: 100 + sum(numbers), failing=[(1, 0, 0)])
  options = {"model": Oracle(outputs, _cost), "cache": tmp_path / "labels.jsonl"}
  tune.tune(network, *ARGS, budget=4, **options)
  told = capsys.readouterr().err.splitlines()
  # Without lines about long work, on a busy machine.
  first, second, third, *lines = [line for line in told if "so far" not in line]
  assert "tracing network" in first and "choices for 3 groups" in second and "measuring" in third
  for number, line in enumerate(lines):
    assert re.match(rf"[\d: -]+ label {number + 1} of 4: ", line)
  assert len(lines) == 4
  assert "1.000 of the compiler's own; groups changed: none, the compiler's own" in lines[0]
  first = list(tried)
  tune.tune(network, *ARGS, budget=4, progress=False, **options)
  assert tried == first and not capsys.readouterr().err
  tune.tune(network, *ARGS, budget=8, progress=False, **options)
  assert len(tried) == 8 + 1  # the compiler's own is measured beside the new ones


def test_what_was_found_with_the_model_for_this_machine_is_saved_and_applied(monkeypatch, tmp_path):
  _labelled_by(monkeypatch, _cost)
  monkeypatch.setattr(measure, "compare", lambda *args, **options: (0.9, 0.85, 0.95))
  found = tune.tune(network, *ARGS, budget=9)
  assert not found.keeps_default
  found.save(tmp_path / "layouts.json")
  lower = lambda function: jax.jit(function).lower(*ARGS).as_text().replace("chosen", "network")
  assert lower(tpugraphs_jax.apply(network, tmp_path / "layouts.json")) == lower(found.function)


def test_a_model_of_other_labels_is_named(monkeypatch, caplog):
  _labelled_by(monkeypatch, lambda numbers: 100)
  with caplog.at_level(logging.WARNING, logger="absl"):
    tune.tune(network, *ARGS, model="layout-v3-estimate", budget=2)
  said = list(dict.fromkeys(record.getMessage() for record in caplog.records))
  assert len(said) == 2  # its labels, and the stage of its programs
  assert "labels of tpu:v3" in said[0] and "before layout assignment" in said[1]


@pytest.mark.parametrize("target", GENERATIONS)
def test_a_model_and_a_prior_ship_for_every_tpu(target, caplog):
  label = labels.TpuEstimate(target)
  with caplog.at_level(logging.WARNING, logger="absl"):
    ranker = tune.load_ranker(None, label)
  assert ranker.about["name"] == "layout-v3-estimate" and not caplog.records
  assert ("labels of tpu:v3" in tune.order_note(ranker, label)) == (target != "tpu:v3")
  assert tune.prior_of(target).about["model"] == "layout-v3-estimate"


def _estimated(monkeypatch, target, estimates):
  """Replaces times of choices by `estimates(problem, numbers)`, or the reasons for none."""

  def label_records(problem, candidates, begin):
    for numbers in candidates:
      milliseconds = estimates(problem, numbers)
      if isinstance(milliseconds, str):
        yield numbers, ValueError(milliseconds)
      else:
        yield numbers, {"milliseconds": milliseconds, "kernels": []}

  monkeypatch.setattr(Problem, "label_records", label_records)
  monkeypatch.setattr(labels, "create", lambda name, **options: labels.TpuEstimate(target))

  def compiled(function, args, target, **options):
    del target, options
    return types.SimpleNamespace(before_layouts=sources.load(function, *args).data)

  monkeypatch.setattr(tpu, "compile_function", compiled)
  monkeypatch.setattr(labels.TpuEstimate, "compile", labels.BytesEstimate().compile)
  monkeypatch.setattr(labels.TpuEstimate, "versions", lambda label: {})


def test_without_a_better_choice_the_compilers_own_stays(monkeypatch, problem):
  _estimated(monkeypatch, "tpu:v3", lambda problem, numbers: 0.5 + sum(numbers))
  found = tune.tune(network, *ARGS, model=Oracle(problem, _cost), budget=2, operands=True)
  assert "the compiler's own choice stays, none had a lower estimated time on tpu:v3" in repr(found)


# Options of the CPU's compiler.
_OPTIONS = {"xla_cpu_enable_fast_math": [True], "xla_cpu_parallel_codegen_split_count": [1, 2, 4]}
_HELPS = {"xla_cpu_parallel_codegen_split_count": 2}


def _time(problem, numbers):
  values = problem.compiler_options_of(numbers)
  cost = 70 * (values.get("xla_cpu_enable_fast_math") is True)
  gain = 150 * (values.items() >= _HELPS.items())
  return (1000 + 20 * sum(problem.layouts_of(numbers)) + cost - gain) / 1000


@pytest.mark.parametrize("function, args", [(network, ARGS), (jnp.tanh, ARGS[:1])])
def test_a_compiler_option_that_helps_is_found_with_and_without_layouts(
  monkeypatch, capsys, function, args
):
  _estimated(monkeypatch, "tpu:v6e", _time)
  monkeypatch.setattr(Problem, "own_orders", lambda problem: [None] * len(problem.default))
  found = tpugraphs_jax.tune(function, *args, target="v6e", budget=10, options=_OPTIONS)
  assert found.compiler_options == _HELPS and found.ratio == 0.85 and not found.keeps_default
  assert found.function is function  # no layout helps
  text = "xla_cpu_parallel_codegen_split_count=2"
  assert f"layouts chosen for 0 of {len(found.numbers) - 2} groups, {text}" in repr(found)
  assert f"0.850 of the compiler's own; groups changed: {text}" in capsys.readouterr().err
  jax.jit(found.function, compiler_options=found.compiler_options).lower(*args).compile()


def test_every_value_of_an_option_is_tried(monkeypatch):
  _estimated(monkeypatch, "tpu:v6e", _time)
  found = tune.tune(jnp.tanh, ARGS[0], target="v6e", budget=9, options=_OPTIONS, progress=False)
  assert sorted(found.tried) == [(fast, count) for fast in range(2) for count in range(4)]


def test_measured_options_are_compared_and_saved_with_the_layouts(monkeypatch, tmp_path):
  cost = lambda numbers: 100 - 9 * (any(numbers[:3]) and any(numbers[3:]))
  tried, compared = _labelled_by(monkeypatch, cost), []
  monkeypatch.setattr(
    measure, "compare", lambda *args, **options: compared.append(args[3]) or (0.9, 0.85, 0.95)
  )
  found = tune.tune(network, *ARGS, budget=40, options=_OPTIONS)
  assert len(tried) == 40 and found.problem.layouts_of(found.numbers) != (0, 0, 0)
  assert compared == [found.compiler_options] != [{}]
  found.save(tmp_path / "layouts.json")
  applied = tpugraphs_jax.apply(network, tmp_path / "layouts.json")
  assert applied.compiler_options == found.compiler_options
  np.testing.assert_allclose(
    jax.jit(applied, compiler_options=applied.compiler_options)(*_arrays()),
    network(*_arrays()),
    rtol=1e-4,
    atol=1e-4,
  )


@pytest.mark.parametrize(
  "options, message",
  [
    ({"xla_no_such": [True]}, "refuses the option xla_no_such=True: .*No such compile option"),
    (_OPTIONS | {"xla_cpu_use_fusion_emitters": ["often"]}, "xla_cpu_use_fusion_emitters='often'"),
    (["xla_cpu_enable_fast_math"], "expected a dictionary from names to lists"),
    ({1: [True]}, "refuses the option 1=True"),
    ({"xla_cpu_enable_fast_math": True}, "fast_math is True, expected a list"),
    ({"xla_cpu_enable_fast_math": []}, r"fast_math is \[\], expected a list"),
    ({"xla_cpu_enable_fast_math": [None]}, "fast_math has None, expected a truth value"),
  ],
)
def test_an_option_that_the_compiler_refuses_is_named_in_a_line(options, message):
  with pytest.raises(ValueError, match=message) as caught:
    tune.tune(network, *ARGS, options=options)
  assert "\n" not in str(caught.value)


@recorded.needs_libtpu
def test_for_a_tpu_changes_say_orders_and_times_that_add_up(monkeypatch):
  label_records = Problem.label_records

  def halved(*args):  # as if every choice were better than the compiler's own
    for numbers, raw in label_records(*args):
      kernels = [
        kernel | {"picoseconds": kernel["picoseconds"] // (1 + any(numbers))}
        for kernel in raw["kernels"]
      ]
      milliseconds = raw["milliseconds"] / (1 + any(numbers))
      yield numbers, {"milliseconds": milliseconds, "kernels": kernels}

  monkeypatch.setattr(Problem, "label_records", halved)
  found = tune.tune(network, *ARGS, target="v3", budget=2)
  default, best = (found.raw[numbers] for numbers in ((0,) * len(found.numbers), found.numbers))
  assert found.ratio == pytest.approx(best["milliseconds"] / default["milliseconds"], rel=1e-3)
  for change, place in zip(found.changes, np.flatnonzero(found.numbers), strict=True):
    assert sorted(change.before) == sorted(change.after[0])  # complete orders of one tensor
    assert change.picoseconds == tuple(
      sum(kernel["picoseconds"] for kernel in raw["kernels"] if kernel["group"] == place)
      for raw in (default, best)
    )
  before, after = (f"{1e3 * raw['milliseconds']:.4g}" for raw in (default, best))
  assert f"{before} -> {after}" in str(found)
  assert f"the best takes {found.ratio:.3f} of the estimated time on tpu:v3" in str(found)


def _milliseconds(change):
  """Times in which each changed group takes a share `change` more."""
  return lambda problem, numbers: (
    1.0 + change * sum(number > 0 for number in problem.layouts_of(numbers))
  )


def _tuned_by(monkeypatch, estimates):
  _estimated(monkeypatch, "tpu:v6e", estimates)
  create = lambda name, **options: labels.TpuEstimate("tpu:v6e")
  monkeypatch.setattr(labels, "create", create)
  monkeypatch.setattr(Problem, "own_orders", lambda problem: [None] * len(problem.default))
  return tune.tune(network, *ARGS, target="v6e", budget=12, progress=False)


def test_the_time_of_estimate_is_compared(monkeypatch):
  found = _tuned_by(monkeypatch, _milliseconds(-0.1))
  default, best = found.raw[found.problem.default], found.raw[found.numbers]
  assert found.ratio == best["milliseconds"] / default["milliseconds"] < 0.9
  assert "the best takes" in repr(found) and "of the estimated time on tpu:v6e" in repr(found)
  assert "nine of ten" in str(found) and "order of a model of labels of tpu:v3" in str(found)
  last = str(found).splitlines()[-1]
  assert last.startswith(f"Apply it, for a gain of {1 - found.ratio:.1%}") and "jax.jit" in last


def test_gains_within_the_margin_are_none(monkeypatch):
  found = _tuned_by(monkeypatch, _milliseconds(-0.005))
  assert found.keeps_default and found.ratio == 1 and min(found.tried.values()) < 1e9
  assert "gains below 2% are no gain" in repr(found)
  assert str(found).splitlines()[-1].startswith("Leave it")


def test_a_choice_that_fails_is_replaced_by_another_trial(monkeypatch):
  estimates = _milliseconds(-0.1)

  def failing(problem, numbers):
    lacks = sum(number > 0 for number in numbers) == 1
    return "it has no time, because a sort has none" if lacks else estimates(problem, numbers)

  found = _tuned_by(monkeypatch, failing)
  assert found.failed > 2 and len(found.raw) == 12
  assert all("because a sort has none" in error for error in found.errors.values())


@pytest.mark.parametrize("wrong", [{"budget": "6"}, {"budget": 6.0}, {"targt": "v6e"}])
def test_a_wrong_option_is_an_error_of_python(wrong):
  with pytest.raises(TypeError, match="integer|targt"):
    tune.tune(network, *ARGS, **wrong)
