"""The table of variants of a step: its order, its file of results, and what stops it."""

import json
import signal

import pytest

from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.infra import tasks
from tpugraphs_jax.tuning import costs, programs, summary, variants

_STEPS = """
import jax.numpy as jnp

def step(x):
  return x

def PROGRAMS():
  for batch in (1, 2, 4):
    yield f"batch{batch}", (step, (jnp.zeros(batch),))

TOKENS = {"batch1": 100, "batch2": 200, "batch4": 400}
"""
_MS = {"batch1": 2.0, "batch2": 3.0, "batch4": None}


@pytest.fixture
def estimated(monkeypatch, tmp_path):
  """A file of three variants, of which the last does not fit; gives those that are estimated."""
  path = tmp_path / "steps.py"
  path.write_text(_STEPS)
  monkeypatch.setattr(summary, "versions", lambda: {"jax": "1"})
  done = []

  def run(work, requests, *, processes, beam, finished):
    del work, processes, beam
    for request in requests:
      key = request.source.rpartition(":")[2]
      done.append(key)
      variant = variants.Variant(key, _MS[key] is not None, 2**30, _MS[key])
      if key == "batch4" and variants.of_row is None:
        raise KeyboardInterrupt
      line = {"key": dict(request.key), "variant": variants.dataclasses.asdict(variant)}
      variants.files.append(tmp_path / "results.jsonl", json.dumps(line).encode())
      finished(key)

  monkeypatch.setattr(tasks, "run", run)
  return path, done


def _compare(path, **options):
  results = path.parent / "results.jsonl"
  return variants.compare(str(path), "tpu:v6e", results, timeout=1.0, processes=1, **options)


def test_the_cheapest_variant_that_fits_is_first():
  made = [
    variants.Variant("failed", why="the compiler failed"),
    variants.Variant("larger", True, 2**30),
    variants.Variant("smaller", True, 2**20),
    variants.Variant("large", False, 2**36, 1.0),
    variants.Variant("slow", True, 1, 8.0, count=100, unit="token"),
    variants.Variant("quick", True, 1, 12.0, count=200, unit="token"),
  ]
  names = ["quick", "slow", "smaller", "larger", "large", "failed"]
  assert [each.name for each in variants.order(made)] == names


def test_results_are_kept_and_only_missing_ones_are_estimated(estimated):
  path, done = estimated
  found = _compare(path)
  assert done == ["batch1", "batch2", "batch4"]
  assert [each.name for each in found.variants] == ["batch1", "batch2", "batch4"]
  assert "3 variants on v6e" in repr(found) and "batch1 is the cheapest that fits" in repr(found)
  lines = (path.parent / "results.jsonl").read_bytes().splitlines(keepends=True)
  (path.parent / "results.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:20])  # a kill
  done.clear()
  assert _compare(path).variants == found.variants and done == ["batch4"]
  done.clear()
  path.write_text(_STEPS + "\n# another version\n")
  _compare(path)
  assert done == ["batch1", "batch2", "batch4"]


def test_results_of_memory_alone_do_not_stand_for_those_with_times(estimated):
  path, done = estimated
  for memory_only in (True, False, True):
    _compare(path, memory_only=memory_only)
  assert done == 2 * ["batch1", "batch2", "batch4"]


def test_an_interrupted_comparison_keeps_its_results(estimated, monkeypatch):
  path, done = estimated
  monkeypatch.setattr(variants, "of_row", None)
  with pytest.raises(KeyboardInterrupt):
    _compare(path)
  assert len(variants._read(path.parent / "results.jsonl")) == 2
  monkeypatch.undo()


def test_ctrl_c_ends_the_processes_and_is_an_interrupt(estimated, monkeypatch):
  path, _ = estimated

  def stop(*_, **__):
    signal.raise_signal(signal.SIGINT)

  monkeypatch.setattr(tasks, "run", stop)
  with pytest.raises(KeyboardInterrupt):
    _compare(path)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_damaged_file_of_results_is_named(estimated):
  path, _ = estimated
  (path.parent / "results.jsonl").write_text('{"key": 1}\n')
  with pytest.raises(ValueError, match="results.jsonl"):
    _compare(path)


def test_a_file_says_how_many_tokens_or_examples_a_step_has(tmp_path):
  path = tmp_path / "steps.py"
  path.write_text(_STEPS)
  loaded = programs.load(str(path))
  assert [(each.count, each.unit) for each in loaded] == [
    (100, "token"),
    (200, "token"),
    (400, "token"),
  ]
  path.write_text(_STEPS.partition("TOKENS")[0] + "EXAMPLES = 8\n")
  assert {(each.count, each.unit) for each in programs.load(str(path))} == {(8, "example")}
  path.write_text(_STEPS.partition("TOKENS")[0] + "EXAMPLES = 0\n")
  with pytest.raises(ValueError, match="EXAMPLES"):
    programs.load(str(path))


def test_a_function_that_yields_programs_may_not_fail_or_repeat_a_name(tmp_path):
  path = tmp_path / "steps.py"
  for body, said in (("raise KeyError(1)", "KeyError"), ("return [('a', 1), ('a', 2)]", "twice")):
    path.write_text(f"def PROGRAMS():\n  {body}\n")
    with pytest.raises(ValueError, match=said):
      programs.load(str(path))


def test_a_variant_that_does_not_fit_names_what_it_needs():
  buffer = costs.buffers.Buffer(
    "a", "temporary", "f32[8,128]", 2**34, 1.0, "add", "", "model.py:3", 0, 1
  )
  live = costs.buffers.LiveMemory(("a",), (2**35,), 0, (buffer,))
  row = costs.TargetEstimate(
    "tpu:v6e", fits=False, live=live, needed=2**35, why="the compiler says: no"
  )
  program = programs.Program("steps.py:a", "steps_a", "train", print, (), count=4, unit="example")
  variant = variants.of_row(row, program)
  assert variant.needed == 2**35 and not variant.fits and "model.py:3" in variant.largest[0]
  row = costs.TargetEstimate("tpu:v6e", 3.0, fits=True, memory=tpu.MemoryPlan(1, 2, 3), needed=6)
  assert variants.of_row(row, program).needed == 6 and not variants.of_row(row, program).largest
