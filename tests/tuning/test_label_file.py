import json
import os

import jax
import jax.numpy as jnp
import pytest

import tpugraphs_jax
from tpugraphs_jax.hlo.calls import Call
from tpugraphs_jax.tuning import label_file, labels
from tpugraphs_jax.tuning.label_file import LabelFile
from tpugraphs_jax.tuning.problem import Problem

_ARGS = (jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32))
_FIRST = [(0,), (1,)]


def _product(x, y):
  return jnp.tanh(x @ y)


def _found(path, problem, candidates):
  found = LabelFile(path, problem)
  found.label_choices(candidates)
  return found


@pytest.fixture
def problem():
  return Problem(Call(_product, _ARGS), labels.BytesEstimate())


@pytest.fixture
def asked(monkeypatch):
  """The choices that are labelled; option 2 fails."""
  asked = []

  def label_records(problem, candidates, begin):
    for numbers in candidates:
      begin(numbers)
      asked.append(numbers)
      raw = {"bytes_accessed": 10 + sum(numbers), "seconds": [1.0 + sum(numbers)]}
      yield numbers, ValueError("it fails") if numbers == (2,) else raw

  monkeypatch.setattr(Problem, "label_records", label_records)
  return asked


def test_a_label_is_made_once_and_then_taken_from_the_file(problem, asked, tmp_path):
  path = tmp_path / "some" / "labels.jsonl"
  found = _found(path, problem, [*_FIRST, (2,)])
  assert asked == [(0,), (1,), (2,)]
  assert list(found.raw) == _FIRST and found.errors == {(2,): "it fails"}
  again = _found(path, problem, asked)
  assert (again.raw, again.errors) == (found.raw, found.errors) and len(asked) == 3
  assert again.ratio((1,)) == 1.1 and again.ratio((2,)) == float("inf")


def test_labels_of_another_program_or_compiler_are_not_taken(problem, asked, monkeypatch, tmp_path):
  path = tmp_path / "labels.jsonl"
  _found(path, problem, _FIRST)
  other = Problem(Call(lambda x, y: jnp.sin(x @ y), _ARGS), problem.label)
  assert len(other.options) == 1
  _found(path, other, _FIRST)
  assert asked == 2 * _FIRST
  monkeypatch.setattr(labels.BytesEstimate, "versions", lambda label: {"jax": "0", "device": "cpu"})
  _found(path, problem, _FIRST)
  assert asked == 3 * _FIRST and label_file.count(path) == 6


def test_labels_of_other_compiler_options_are_not_taken(asked, tmp_path):
  for count, values in enumerate([[1, 2], [1, 2], [2, 1]]):
    problem = Problem(
      Call(_product, _ARGS), labels.BytesEstimate(), compiler_options={"xla_flag": values}
    )
    _found(tmp_path / "labels.jsonl", problem, [(0, 0), (0, 1)])
    assert len(asked) == (2, 2, 4)[count]


def test_labels_that_a_kill_interrupted_end_with_the_same_lines(
  problem, asked, monkeypatch, tmp_path
):
  whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
  _found(whole, problem, [*_FIRST, (2,)])
  label_records = Problem.label_records

  def killed(problem, candidates, begin):
    yield from label_records(problem, candidates[:-1], begin)
    begin(candidates[-1])
    raise KeyboardInterrupt

  for _ in range(2):
    monkeypatch.setattr(Problem, "label_records", killed)
    with pytest.raises(KeyboardInterrupt):
      _found(resumed, problem, _FIRST)
    monkeypatch.setattr(Problem, "label_records", label_records)
  _found(resumed, problem, [*_FIRST, (2,)])
  assert sorted(resumed.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_line_that_a_kill_cut_short_is_made_again(problem, asked, tmp_path):
  path = tmp_path / "labels.jsonl"
  _found(path, problem, _FIRST)
  whole = path.read_bytes()
  path.write_bytes(whole[:-9])
  _found(path, problem, _FIRST)
  assert asked == [*_FIRST, (1,)]
  assert set(path.read_bytes().splitlines()) == set(whole.splitlines())


@pytest.mark.parametrize("line", ["some notes", '{"seed": 1}', "[]", '{"label": 3}'])
def test_another_file_is_refused_by_its_line(problem, tmp_path, line):
  path = tmp_path / "labels.jsonl"
  path.write_text(f"{line}\n")
  with pytest.raises(ValueError, match="labels.jsonl, line 1: .* is no label"):
    LabelFile(path, problem)


def test_lines_of_an_earlier_version_are_refused_by_what_they_lack(problem, asked, tmp_path):
  path = tmp_path / "labels.jsonl"
  _found(path, problem, _FIRST)
  path.write_text("".join(f"{json.dumps(record)}\n" for record in label_file.records(path)))
  with pytest.raises(ValueError, match="line 1: .* is no label .it has no checksum"):
    LabelFile(path, problem)


@pytest.mark.parametrize(
  "old, new", [('"numbers": [1]', '"numbers": [2]'), ("bytes", "bytez"), ("checksum", "checksun")]
)
def test_a_damaged_line_is_refused_with_its_file_and_number(problem, asked, tmp_path, old, new):
  path = tmp_path / "labels.jsonl"
  _found(path, problem, _FIRST)
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines[:-1], lines[-1].replace(old, new)]))
  with pytest.raises(ValueError, match=r"labels\.jsonl, line 4"):
    LabelFile(path, problem)


def test_the_last_line_names_the_choice_that_was_begun_and_not_ended(problem, tmp_path):
  path = tmp_path / "labels.jsonl"
  assert label_file.interrupted(path) is None
  file = LabelFile(path, problem)
  file._begin((1,))
  begun = label_file.interrupted(path)
  assert begun["numbers"] == [1]
  label_file.append(path, begun | {"error": "no"})
  assert label_file.interrupted(path) is None
  file = _found(path, problem, [(0,), (1,)])
  assert file.errors == {(1,): "no"} and list(file.raw) == [(0,)]


@pytest.mark.parametrize("is_pipe", [False, True])
def test_labels_are_neither_read_nor_written_through_a_link_or_a_pipe(problem, tmp_path, is_pipe):
  path = tmp_path / "labels.jsonl"
  (tmp_path / "precious").touch()
  os.mkfifo(path) if is_pipe else path.symlink_to(tmp_path / "precious")
  for use in (
    lambda: LabelFile(path, problem),
    lambda: label_file.count(path),
    lambda: label_file.append(path, {"label": "measured"}),
  ):
    with pytest.raises(ValueError, match="a link to|a pipe"):
      use()
  assert not (tmp_path / "precious").read_text()


def test_times_of_another_day_are_compared_by_the_compilers_own_choice(monkeypatch, tmp_path):
  problem = Problem(Call(_product, _ARGS), labels.Measured())
  speed = [1.0]
  label_records = lambda problem, candidates, begin: [
    (numbers, {"seconds": [speed[0] * (1 + sum(numbers))]}) for numbers in candidates
  ]
  monkeypatch.setattr(Problem, "label_records", label_records)
  path = tmp_path / "labels.jsonl"
  _found(path, problem, _FIRST)
  speed[0] = 3.0  # the machine is three times slower now
  found = _found(path, problem, [*_FIRST, (2,)])
  assert [raw["seconds"] for raw in found.raw.values()] == [[1.0], [2.0], [3.0]]
  assert len(json.loads(path.read_text().splitlines()[-1])["numbers"]) == 1


def test_a_failure_of_the_compilers_own_choice_is_the_cached_answer(problem, monkeypatch, tmp_path):
  asked = []

  def label_records(problem, candidates, begin):
    asked.extend(candidates)
    return [(numbers, ValueError("out of memory")) for numbers in candidates]

  monkeypatch.setattr(Problem, "label_records", label_records)
  path = tmp_path / "labels.jsonl"
  assert _found(path, problem, [(0,)]).errors == {(0,): "out of memory"}
  for candidates in ([(0,)], _FIRST, [(1,)]):
    again = _found(path, problem, candidates)
    assert again.errors == {(0,): "out of memory"} and not again.raw
  assert asked == [(0,)]
  with pytest.raises(ValueError, match="own choice cannot be labelled: out of memory"):
    tpugraphs_jax.tune(_product, *_ARGS, cache=tmp_path / "other.jsonl", progress=False)
  with pytest.raises(ValueError, match="own choice cannot be labelled: out of memory"):
    tpugraphs_jax.tune(_product, *_ARGS, cache=tmp_path / "other.jsonl", progress=False)


@pytest.mark.parametrize("label", [{}, {"a": 1}, [], "12", None, True])
def test_a_label_that_is_no_number_is_refused_by_its_line(problem, asked, tmp_path, label):
  path = tmp_path / "labels.jsonl"
  _found(path, problem, [(0,)])
  record = label_file.records(path)[-1]
  path.unlink()
  label_file.append(path, record | {"raw": {"bytes_accessed": label}})
  with pytest.raises(ValueError, match="line 1: .* is no label"):
    LabelFile(path, problem)
