"""Lines of the commands: times off a terminal, warnings on standard error, one-line errors."""

from concurrent import futures
import contextlib
import functools
import io
import logging
import os
import re
import signal
import threading
import time

import jax
import numpy as np
import pytest

from tpugraphs_jax.infra import console

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def installed():
  before = logging.getLogger().handlers
  console.install()
  yield
  logging.getLogger().handlers = before


def test_lines_on_a_terminal_have_no_time_and_stay(monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr("sys.stdout", terminal)
  console.say("step 1")
  console.say("step 2")
  assert terminal.getvalue() == "step 1\nstep 2\n"


def test_log_messages_have_a_time_and_warnings_go_to_standard_error(installed, capsys):
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(logging.INFO)
  logger.info("told %d", 1)
  logger.warning("skipped %s", "a.npz")
  logger.setLevel(before)
  shown = capsys.readouterr()
  assert re.fullmatch(f"{TIME}told 1\n", shown.out)
  assert re.fullmatch(f"{TIME}warning: skipped a.npz\n", shown.err)


@pytest.mark.parametrize(
  "said, expected",
  [
    ("plain", "plain"),
    ("two\nlines\r\n", "two lines"),
    ("bell\a", r"bell\x07"),
    ("naïve 図", "naïve 図"),
    (ValueError(), "ValueError"),
    (OSError("a\n b"), "a b"),
    ("two  spaces", "two  spaces"),
    ("a\u2028b\ud800", r"a b\ud800"),
  ],
)
def test_one_line_makes_any_message_one_printable_line(said, expected):
  assert console.one_line(said) == expected


def test_a_mistake_ends_a_command_in_one_line_with_exit_code_2(capsys):
  with pytest.raises(SystemExit) as ended:
    console.fail(ValueError("no\nfolder"))
  assert ended.value.code == 2 and capsys.readouterr().err == "error: no folder\n"


@pytest.mark.parametrize(
  "flag, told",
  [("--targts", "did you mean --targets?"), ("--zz", "`python -m tpugraphs_jax.x --help` says")],
)
def test_an_unknown_flag_is_one_line_with_the_nearest_one(capsys, flag, told):
  parser = console.parser("x", None)
  parser.add_argument("--targets")
  with pytest.raises(SystemExit, match="2"):
    parser.parse_args([flag, "v6e"])
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: unrecognized arguments: {flag} v6e; ") and told in line


def test_ctrl_c_in_code_whose_exceptions_are_dropped_ends_the_command_all_the_same(capsys):
  class Object:
    def __del__(self):
      signal.raise_signal(signal.SIGINT)

  @console.command(keeps="nothing is lost")
  def main(argv):
    kept = [Object()]
    kept.clear()
    time.sleep(60)

  with pytest.raises(SystemExit, match="130"):
    main([])
  assert "interrupted: nothing is lost" in capsys.readouterr().err
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_platform_without_a_device_ends_a_command_in_one_line(monkeypatch, capsys):
  def fails(*_, message="no device"):
    raise RuntimeError(message)

  command = console.command(fails)
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  with pytest.raises(RuntimeError):  # the platform has devices: it is another error
    command([])
  message = "Unable to initialize backend 'cuda'\nand more"  # as of one of several platforms
  assert console.command(functools.partial(fails, message=message))([]) == 2
  monkeypatch.setattr(jax, "devices", fails)
  assert command([]) == 2
  for line in (lines := capsys.readouterr().err.splitlines()):
    assert line.startswith("error: JAX_PLATFORMS is 'cuda'")
  assert len(lines) == 2


def test_characters_that_a_stream_does_not_have_are_escaped(monkeypatch):
  written = io.BytesIO()
  monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
  console.say("folder \u56f3")
  console.say("more")
  assert written.getvalue().decode().splitlines()[0].endswith("folder \\u56f3")
  assert written.getvalue().endswith(b"more\n")


def test_nothing_is_written_where_a_process_has_no_output(monkeypatch):
  monkeypatch.setattr("sys.stdout", None)
  console.say("lost")


def test_columns_are_as_wide_as_their_cells_and_empty_ones_are_left_out():
  table = console.Table(["name", "unit", "n"], [["a", "", "10"], ["longer", "", "2"]], "sizes")
  assert str(table).splitlines() == ["sizes", "", "name    n", "a       10", "longer  2"]


def test_html_has_the_same_cells_and_no_tags_of_the_content():
  html = console.Table(["name", "unit"], [["<script>", ""]], "a & b")._repr_html_()
  assert "&lt;script&gt;" in html and "a &amp; b" in html
  assert "<script" not in html and "unit" not in html


def test_without_rows_only_the_title_is_left():
  assert str(console.Table(["name"], [], "nothing")) == "nothing"
  assert console.Table(["name"], [], "nothing")._repr_html_() == "<p>nothing</p>"


def test_a_long_message_is_cut_in_its_middle():
  words = console.one_line("begin " + 10**6 * "x" + " end")
  assert len(words) < 2100 and words.startswith("begin x") and words.endswith("x end")


def test_a_lack_of_memory_is_one_line(capsys):
  @console.command
  def main(argv):
    raise MemoryError

  assert main([]) == 2
  assert capsys.readouterr().err.startswith("error: not enough memory")


def test_a_transfer_that_the_user_forbids_is_one_line():
  with pytest.raises(ValueError, match="JAX_TRANSFER_GUARD"), console.explaining_devices():
    with jax.transfer_guard("disallow"):
      jax.jit(lambda x: x + 1)(np.ones(3))


@pytest.fixture
def scaled(monkeypatch):
  """A twentieth of a second stands for ten."""
  monkeypatch.setattr(console, "SECONDS", 0.05)


def _told_until(capsys, text):
  """Standard error until it holds a text."""
  told, deadline = "", time.monotonic() + 60
  while text not in told and time.monotonic() < deadline:
    time.sleep(0.01)
    told += capsys.readouterr().err
  assert text in told
  return told


def test_long_work_says_what_it_does_how_far_it_is_and_how_to_stop(scaled, capsys):
  with console.working("estimate"), console.working("cnn", total=4, unit="targets") as targets:
    with console.working("compiling for v6e"):
      told = _told_until(capsys, "so far; stop it with")
    targets.update()
    told += _told_until(capsys, "1 of 4 targets; ")
  first, *_ = told.splitlines()
  assert re.fullmatch(
    TIME
    + r"estimate: cnn, 0 of 4 targets: compiling for v6e; \d+ s so far; stop it with `kill \d+`",
    first,
  )
  assert re.search(r"estimate: cnn, 1 of 4 targets; \d+ s so far, about \d+ s left; ", told)


def test_work_that_has_ended_is_silent(scaled, capsys):
  with console.working("reading"):
    _told_until(capsys, "reading")
  capsys.readouterr()
  time.sleep(0.2)
  assert capsys.readouterr().err == ""
  assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_lines_of_the_work_itself_are_enough(monkeypatch, capsys):
  monkeypatch.setattr(console, "SECONDS", 1.0)
  with console.working("training"):
    for step in range(20):
      console.say(f"step {step}")
      time.sleep(0.1)
  assert capsys.readouterr().err == ""


def test_nothing_is_told_where_nothing_is_asked_for(scaled, capsys):
  with console.working("tune", is_on=False) as work, console.working("compiling"):
    work.note("label 1 of 4")
    time.sleep(0.2)
  assert capsys.readouterr().err == ""


def test_nothing_is_told_while_a_user_is_waited_for(scaled, capsys):
  with console.working("view"), console.working("serving a page", is_on=False):
    time.sleep(0.3)
  assert capsys.readouterr().err == ""


def test_threads_tell_of_their_own_work(scaled, capsys):
  with console.working("collecting"), futures.ThreadPoolExecutor(1) as pool:

    def read():
      with console.working("reading"):
        return _told_until(capsys, "reading; ")

    told = pool.submit(read).result() + _told_until(capsys, "collecting; ")
  assert re.search(f"{TIME}reading; ", told)


@pytest.mark.parametrize("unit, is_shown", [("files", True), ("", False)])
def test_work_that_is_counted_has_a_bar_on_a_terminal(monkeypatch, scaled, unit, is_shown):
  terminal = Terminal()
  monkeypatch.setattr("sys.stderr", terminal)
  with console.working("writing", total=3, unit=unit) as work:
    for _ in range(3):
      time.sleep(0.5)
      work.update()
  said = terminal.getvalue()
  assert ("\r" in said) == is_shown and ("3/3" in said or "2/3" in said) == is_shown
  assert "writing" in said and "stop it with" in said


@pytest.mark.parametrize("is_deaf", [True, False])
def test_after_ctrl_c_a_line_says_what_is_waited_for(capsys, is_deaf):
  """A library that keeps the main thread is deaf."""

  def finish(number, frame):
    if not is_deaf:
      raise KeyboardInterrupt

  before = signal.signal(signal.SIGINT, finish)
  try:
    with console.working("training"), contextlib.suppress(KeyboardInterrupt):
      with console.working("compiling a step"):
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.5)
  finally:
    signal.signal(signal.SIGINT, before)
  told = capsys.readouterr().err
  assert ("Ctrl-C: waiting for an end of: training: compiling a step" in told) == is_deaf
  assert bool(told) == is_deaf


def test_the_wakeup_of_a_loop_of_events_is_its_own_again():
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  before = signal.set_wakeup_fd(writer)
  try:
    with console.working("training"):
      pass
  finally:
    assert signal.set_wakeup_fd(before) == writer
    os.close(reader)
    os.close(writer)
