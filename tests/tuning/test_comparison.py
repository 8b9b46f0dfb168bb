"""Files of estimates, and estimates side by side."""

import json

import pytest

from tpugraphs_jax.tuning import comparison, costs, summary

_DOT = costs.KernelCost("dot.1", "dot_general", "Net/Dense_0", "net.py:3", "bf16[8,128]")
_COPY = costs.KernelCost("copy.2", "copy", "", "net.py:9", "bf16[8,128]")


def _with_ms(kernel, milliseconds, **changes):
  return costs.dataclasses.replace(kernel, milliseconds=milliseconds, **changes)


def _estimate(*kernels, name="step", target="tpu:v6e", ms=None, libtpu="0.0.42.1", **fields):
  ms = sum(kernel.milliseconds for kernel in kernels) if ms is None else ms
  row = costs.TargetEstimate(target, ms or None, kernels=kernels, **fields)
  return summary.Estimate(name, (row,), {"jax": "0.10.2", "libtpu": libtpu})


def test_a_file_gives_the_times_kernels_and_versions_that_were_saved(tmp_path):
  kernel = _with_ms(_DOT, 1.25, calls=3, stall=0.5, bound="memory", cycles=7, bytes_accessed=9)
  before = _estimate(kernel, _with_ms(_COPY, None, why="a loop"), ms=1.5, cycles=7, flops=2.0)
  before.save(tmp_path / "a.json")
  (after,) = summary.load(tmp_path / "a.json")
  assert (after.name, after.versions, after.rows) == (before.name, before.versions, before.rows)
  assert "1.25" in repr(after)


@pytest.mark.parametrize(
  "change, word",
  [
    (lambda values: values.update(kind="something"), "estimates"),
    (lambda values: values.update(version=1), "version"),
    (lambda values: values["programs"][0].pop("rows"), "rows"),
    (lambda values: values["programs"][0]["rows"][0].update(target="tpu:v9"), "v9"),
    (lambda values: values["programs"][0]["rows"][0].update(milliseconds="1"), "milliseconds"),
    (lambda values: values["programs"][0]["rows"][0].update(why="guess"), "guess"),
    (lambda values: values["programs"][0]["rows"][0].update(milliseconds=-1), "negative"),
    (lambda values: values["programs"][0]["rows"][0].update(milliseconds=float("nan")), "finite"),
    (lambda values: values["programs"][0]["rows"][0]["kernels"][0].pop("where"), "where"),
  ],
)
def test_foreign_and_damaged_files_are_refused_in_a_line(tmp_path, change, word):
  path = tmp_path / "a.json"
  _estimate(_with_ms(_DOT, 1.0)).save(path)
  values = json.loads(path.read_text())
  change(values)
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match=word) as caught:
    summary.load(path)
  assert "\n" not in str(caught.value) and "a.json" in str(caught.value)


def test_no_file_prints_commands_to_a_terminal(tmp_path):
  _estimate(_with_ms(_DOT, 1.0, operation="dot\x1b[2J"), name="a\x07b").save(tmp_path / "a.json")
  assert "\x1b" not in (text := repr(summary.load(tmp_path / "a.json")[0])) and "\x07" not in text


def test_files_that_are_missing_or_no_json_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError):
    summary.load(tmp_path / "none.json")
  (tmp_path / "text.json").write_text("no json")
  with pytest.raises(ValueError, match="damaged"):
    summary.load(tmp_path / "text.json")


def test_kernels_are_matched_by_line_and_name_then_where_lines_have_moved():
  before = [_with_ms(_DOT, 1.0), _with_ms(_DOT, 2.0, name="dot.7"), _with_ms(_COPY, 0.5)]
  other = costs.KernelCost("sort.1", "sort", "", "net.py:20", "f32[4]", milliseconds=0.25)
  gone = costs.KernelCost("tanh.1", "tanh", "", "net.py:2", "f32[4]", milliseconds=0.125)
  after = [_with_ms(_DOT, 4.0), _with_ms(_COPY, 0.25, where="net.py:11"), other]
  found = comparison.changes_of([*before, gone], after)
  changes = {change.kernel.operation: (change.before, change.after) for change in found}
  assert changes == {
    "dot_general": (3.0, 4.0),
    "copy": (0.5, 0.25),
    "sort": (None, 0.25),
    "tanh": (0.125, None),
  }
  assert [change.more for change in found] == sorted((c.more for c in found), reverse=True)


def test_collectives_are_compared_by_the_time_for_which_the_device_waits():
  gather = costs.CollectiveCost(
    "all-gather.1", "all-gather", ("x",), 8, 1, 2.0, 1.0, "dot", "n.py:3"
  )
  moved = costs.dataclasses.replace(gather, where="n.py:5", exposed_ms=0.25)
  scatter = costs.CollectiveCost("rs", "reduce-scatter", ("x",), 8, 1, 2.0, 0.5, "dot", "n.py:4")
  (shorter, more) = sorted(comparison.waits_of([gather], [moved, scatter]), key=lambda w: w.more)
  assert (shorter.before, shorter.after, shorter.collective) == (1.0, 0.25, moved)
  assert (more.before, more.after, more.collective) == (None, 0.5, scatter)
  sides = [
    _estimate(ms=3.0, target="tpu:v6e:2x2", communication=each, exposed_ms=exposed)
    for each, exposed in (((gather,), 1.0), ((moved, scatter), 0.75))
  ]
  text = repr(comparison.compare(sides[:1], sides[1:]))
  assert "waits 1 ms for others before and 0.75 after" in text
  assert "reduce-scatter" in text and "n.py:5" in text
  assert "waits" not in repr(comparison.compare(sides[:1], sides[:1]))


def test_a_program_is_slower_beyond_the_part_that_is_allowed():
  before, after = _estimate(_with_ms(_DOT, 1.0)), _estimate(_with_ms(_DOT, 1.03))
  assert comparison.compare([before], [after], slower=0.02).is_slower
  assert not comparison.compare([before], [after], slower=0.04).is_slower
  assert not comparison.compare([after], [before]).is_slower
  assert not comparison.compare([before], [before]).is_slower
  text = repr(comparison.compare([before], [after], slower=0.02))
  assert "1.030" in text and "dot_general Net/Dense_0 net.py:3 (+0.03 ms)" in text


def test_a_program_that_has_no_time_any_more_is_slower():
  before, after = _estimate(_with_ms(_DOT, 1.0)), _estimate(ms=0, why="it has a loop")
  found = comparison.compare([before], [after], slower=9.0)
  assert found.is_slower and "because it has a loop" in repr(found)
  assert not comparison.compare([after], [before]).is_slower


def test_programs_are_matched_by_name_and_target_and_differences_of_versions_are_named():
  old = [_estimate(_with_ms(_DOT, 1.0), name=name, libtpu="0.0.40") for name in ("a", "b")]
  new = [_estimate(_with_ms(_DOT, 2.0), name=name) for name in ("b", "c")]
  found = comparison.compare(old, new)
  assert [pair.name for pair in found.pairs] == ["b"]
  assert "libtpu 0.0.40 -> 0.0.42.1" in repr(found) and "libtpu 0.0.40" in found._repr_html_()
  alone = comparison.compare(old[:1], new[:1])  # one on each side
  assert [pair.name for pair in alone.pairs] == ["b (before: a)"]
  with pytest.raises(ValueError, match="a for v6e"):
    comparison.compare(old[:1], [_estimate(_with_ms(_DOT, 2.0), target="tpu:v5e")])


@pytest.mark.parametrize("slower", [-0.1, float("nan"), float("inf")])
def test_a_part_that_is_none_is_refused(slower):
  with pytest.raises(ValueError, match="slower is"):
    comparison.compare([], [], slower=slower)
