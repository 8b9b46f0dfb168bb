"""Pages of results: what stands on them; no text of a program becomes a part of them."""

import dataclasses
import html
import json
import re

import pytest

from tests.support import steps
from tpugraphs_jax.hlo import topology
from tpugraphs_jax.tuning import (
  comparison,
  costs,
  estimate,
  estimate_command,
  page,
  profile,
  summary,
  tiles,
  variants,
)

_EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(1)">{{ 7 * 7 }}'


def _estimate(*rows, name="step"):
  return summary.Estimate(name, rows, {"jax": "1", "libtpu": "2"})


def _step():
  return steps.row(
    [
      steps.kernel("fusion.1", 4.0, scope="LM/Attention", where="model.py:31"),
      steps.kernel("fusion.2", 2.0, scope="LM/Dense", bound="vector work"),
      steps.kernel("fusion.3", 3.0, scope="gradient of LM/Dense", bound="memory"),
    ],
    between=1.0,
    live=steps.live(),
  )


def _frames(text):
  """Name, left, width, depth and colour of the frames of each flame."""
  pattern = (
    r'class="frame (\w+)"[^>]*data-left="([\d.]+)" data-width="([\d.]+)" data-depth="(\d+)"'
    r"[^>]*>([^<]*)<"
  )
  return [
    [
      (html.unescape(name), float(left), float(width), int(depth), colour)
      for colour, left, width, depth, name in re.findall(pattern, flame)
    ]
    for flame in text.split('<div class="flame"')[1:]
  ]


def _saved(result, tmp_path):
  result.save_html(tmp_path / "page.html")
  return (tmp_path / "page.html").read_text()


def test_the_verdict_names_the_dearest_module_its_line_and_what_bounds_it(tmp_path):
  (sentence,) = _estimate(_step())._verdict()
  assert sentence.startswith("v6e: 10 ms")
  assert "40% of it is LM/Attention, bound by products" in sentence
  assert "model.py:31" in sentence
  assert html.escape(sentence) in _saved(_estimate(_step()), tmp_path)


def test_the_verdict_names_the_dearest_line_where_no_module_has_as_much_time():
  row = steps.row(
    [
      steps.kernel("copy.1", 1.0, scope="bgql,blgh->bgqh"),
      steps.kernel("fusion.1", 3.0, operation="dot_general", where="step.py:36"),
      steps.kernel("fusion.2", 2.0, operation="dot_general", where="step.py:36"),
    ],
    between=4.0,
  )
  (sentence,) = _estimate(row)._verdict()
  assert "50% of it is dot_general, step.py:36, bound by products." in sentence


def test_the_verdict_names_the_collective_that_the_device_waits_for_longest():
  kernel = steps.kernel("fusion.1", 3.0, operation="dot_general", where="step.py:36")
  wait = costs.CollectiveCost(
    "all-gather.1", "all-gather", ("fsdp",), 2**20, 4, 7.0, 6.0, "all_gather", "step.py:40"
  )
  for exposed, expected in (
    (6.0, "60% of it is the wait for all-gather along fsdp: all_gather, step.py:40."),
    (2.0, "30% of it is dot_general, step.py:36, bound by products."),
  ):
    collective = dataclasses.replace(wait, exposed_ms=exposed)
    row = dataclasses.replace(steps.row([kernel], between=7.0), communication=(collective,))
    (sentence,) = _estimate(row)._verdict()
    assert expected in sentence
  row = dataclasses.replace(row, communication=(dataclasses.replace(wait, axes=()),))
  (sentence,) = _estimate(row)._verdict()
  assert "60% of it is the wait for all-gather: all_gather, step.py:40." in sentence


def test_frames_are_as_wide_as_their_time_and_lie_inside_of_their_scope(tmp_path):
  (frames,) = _frames(_saved(_estimate(_step()), tmp_path))
  by_name = {(name, depth): (left, width, colour) for name, left, width, depth, colour in frames}
  assert by_name["v6e", 0][:2] == (0, 100)
  assert by_name["LM", 1] == (0, 60, "products")
  assert by_name["gradient", 1] == (60, 30, "memory")
  assert by_name["between kernels", 1] == (90, 10, "between")
  assert by_name["Attention", 2][1:] == (40, "products")
  for name, left, width, depth, _ in frames:
    if depth:
      assert any(
        start - 1e-6 <= left and left + width <= start + size + 1e-6
        for other, start, size, above, _ in frames
        if above == depth - 1
      ), name
  for depth in range(5):
    assert sum(width for _, _, width, at, _ in frames if at == depth) <= 100 + 1e-6


def test_targets_have_one_scale(tmp_path):
  fast = steps.row([steps.kernel("a", 1.0)], target="tpu:7x")
  text = _saved(_estimate(_step(), fast), tmp_path)
  widths = re.findall(r'<div class="flame" style="width: ([\d.]+)%', text)
  assert list(map(float, widths)) == [100, 10]


def test_small_kernels_share_a_frame_and_no_time_is_lost(tmp_path):
  (frames,) = _frames(_saved(_estimate(steps.large()), tmp_path))
  assert len(frames) < 2500
  assert any("smaller" in name for name, *_ in frames)
  assert sum(width for *_, width, depth, _ in [frame for frame in frames] if depth == 1) == (
    pytest.approx(100, abs=0.05)
  )


def test_a_program_without_a_time_says_why(tmp_path):
  without = steps.row([steps.kernel("a", None)], milliseconds=None, why="a loop ends on data")
  text = _saved(_estimate(without), tmp_path)
  assert "no time, because a loop ends on data" in text


def test_the_page_has_all_kernels_with_lines_and_the_buffers_at_the_peak(tmp_path):
  text = _saved(_estimate(_step()), tmp_path)
  for word in ("fusion.1", "fusion.2", "fusion.3", "model.py:31", "f32[8,<wbr>2]", "64x"):
    assert word in text
  assert "1 GiB are live at the peak" in text


def test_the_timeline_has_the_calls_in_their_order(tmp_path):
  text = _saved(_estimate(_step()), tmp_path)
  (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)
  timeline = json.loads(data)
  (track,) = timeline["tracks"]
  shown = [(start, end, timeline["labels"][label]) for start, end, label, _ in track["events"]]
  assert [event[:2] for event in shown] == [(0, 1), (1, 5), (5, 7), (7, 10)]
  assert "LM/Attention" in shown[1][2] and timeline["end"] == 10


def _results():
  estimate = _estimate(_step())
  slower = _estimate(steps.row([*_step().kernels, steps.kernel("new.9", 5.0)]))
  yield estimate
  yield comparison.compare([estimate], [slower])
  yield tiles.Tiles("kernel", "tpu:v6e", (tiles.TileTime({"block": 8}, 1.0),))
  yield profile.Measured(
    "jit_step", "tpu:v6e", "TPU v6 Lite", 3, 1, 1.0, 1.1,
    (profile.Operation(steps.kernel("a", 1.0), 1, 0.9, 1.0),),
  )  # fmt: skip
  yield page.together([estimate, slower])
  yield variants.Variants("tpu:v6e", (variants.Variant("small", True, 2**30, 1.0),))


@pytest.mark.parametrize("result", list(_results()), ids=lambda result: type(result).__name__)
def test_every_result_is_a_page_and_a_part_of_a_notebook(result, tmp_path):
  text, part = _saved(result, tmp_path), result._repr_html_()
  assert text.lstrip().startswith("<!doctype html>") and "<table" in text
  assert "<script" not in part and "<table" in part and "<html" not in part
  for shown in (text, part):
    assert not re.search(r'(src|href)="(?!#)', shown) and "url(" not in shown
  for sentence in result._verdict():
    assert html.escape(sentence) in text


def test_two_versions_show_what_changed(tmp_path):
  _, compared, *_ = _results()
  text = _saved(compared, tmp_path)
  assert "slower" in text.split("<table")[0]
  assert len(_frames(text)) == 2
  assert "new.9" in text


def test_nothing_of_a_program_becomes_a_part_of_the_page(tmp_path):
  evil = steps.kernel(
    _EVIL, 1.0, scope=_EVIL.replace("/", ""), operation=_EVIL, where=_EVIL, shape=_EVIL
  )
  rows = steps.row([evil], why=_EVIL)
  result = _estimate(rows, name=_EVIL)
  for text in (_saved(result, tmp_path), result._repr_html_()):
    assert "<img" not in text and "alert(1)</script>" not in text and "49" not in text
    assert text.count("<script>") in (0, 2)


def test_tables_of_a_notebook_are_those_of_the_text():
  estimate = _estimate(_step())
  assert "step: estimates from what the TPU compiler makes of it" in estimate._repr_html_()


def test_the_command_writes_the_page_and_the_trace(tmp_path, monkeypatch, capsys):
  (tmp_path / "steps.py").write_text(
    "PROGRAMS = {'one': (lambda: 1, ()), 'two': (lambda: 2, ())}\n", encoding="utf-8"
  )
  monkeypatch.setattr(estimate, "estimate_call", lambda *_, **__: _estimate(_step()))
  monkeypatch.setattr(topology, "full_name", "tpu:{}".format)  # in the place of libtpu
  paths = {flag: tmp_path / f"{flag}.out" for flag in ("html", "trace", "save")}
  flags = [word for flag, path in paths.items() for word in (f"--{flag}", str(path))]
  source = str(tmp_path / "steps.py")
  assert estimate_command.main([source, *flags]) == 0
  text = paths["html"].read_text()
  assert len(_frames(text)) == 2 and "steps_one v6e" in text and "steps_two v6e" in text
  events = json.loads(paths["trace"].read_text())["traceEvents"]
  assert {event["pid"] for event in events} == {1, 2}
  against = ["--against", str(paths["save"]), "--html", str(tmp_path / "both.html")]
  assert estimate_command.main([source, *against]) == 0
  assert "before and after" in (tmp_path / "both.html").read_text()
  assert "steps_one" in capsys.readouterr().out
