"""Lines are whole, carry a time where nobody is watching, and warnings stand apart."""

import io
import logging
import re
import subprocess
import sys

import pytest
import tqdm

from tpugraphs_jax import console

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


def test_off_a_terminal_every_line_has_a_time(capsys):
  console.say("one\ntwo")
  assert re.fullmatch(f"{TIME}one\n{TIME}two\n", capsys.readouterr().out)


def test_on_a_terminal_a_line_is_as_it_is_and_stays(monkeypatch):
  terminal = Terminal()
  monkeypatch.setattr("sys.stdout", terminal)
  console.say("step 1")
  console.say("step 2")
  assert terminal.getvalue() == "step 1\nstep 2\n"


def test_messages_of_the_log_take_the_same_form(installed, capsys):
  logger = logging.getLogger("absl")
  before = logger.level
  logger.setLevel(logging.INFO)
  logger.info("told %d", 1)
  logger.warning("skipped %s", "a.npz")
  logger.setLevel(before)
  shown = capsys.readouterr()
  assert re.fullmatch(f"{TIME}told 1\n", shown.out)
  assert re.fullmatch(f"{TIME}warning: skipped a.npz\n", shown.err)


def test_a_traceback_in_the_log_is_shown_line_by_line(installed, capsys):
  try:
    raise KeyError("x")
  except KeyError:
    logging.getLogger("absl").warning("no page", exc_info=True)
  lines = capsys.readouterr().err.splitlines()
  assert lines[-1].endswith("KeyError: 'x'") and all(re.match(TIME, line) for line in lines)


@pytest.mark.parametrize("stream, is_wanted, is_shown", [
    (Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)])
def test_bars_are_for_terminals(stream, is_wanted, is_shown):
  file = stream()
  list(tqdm.tqdm(range(3), file=file, disable=console.bar(is_wanted)))
  assert ("\r" in file.getvalue()) == is_shown


@pytest.mark.parametrize("said, expected", [
    ("plain", "plain"), ("two\nlines\r\n", "two lines"), ("bell\a", r"bell\x07"),
    ("naïve 図", "naïve 図"), (ValueError(), "ValueError"), (OSError("a\n b"), "a b"),
    ("two  spaces", "two  spaces"),
    ("a\u2028b\ud800", r"a b\ud800")])
def test_one_line_has_no_more_than_one_and_can_be_printed(said, expected):
  assert console.one_line(said) == expected


@pytest.mark.parametrize("count, expected", [
    (0, "0 B"), (999, "999 B"), (26_300, "26.3 kB"), (26e3, "26 kB"), (999_600, "1 MB"),
    (1.5e9, "1.5 GB"), (2e13, "20 TB")])
def test_a_size_has_three_digits_and_a_unit(count, expected):
  assert console.size(count) == expected


@pytest.mark.parametrize("seconds, expected", [
    (7.2, "7 s"), (99, "99 s"), (100, "2 min"), (3600, "60 min"), (12_600, "3.5 h"),
    (360_000, "100.0 h")])
def test_a_duration_is_told_in_its_unit(seconds, expected):
  assert console.duration(seconds) == expected


def test_a_mistake_ends_a_command_in_one_line_with_exit_code_2(capsys):
  with pytest.raises(SystemExit) as ended:
    console.fail(ValueError("no\nfolder"))
  assert ended.value.code == 2 and capsys.readouterr().err == "error: no folder\n"


def test_the_package_says_what_commands_there_are():
  told = subprocess.run([sys.executable, "-m", "tpugraphs_jax"], capture_output=True, text=True)
  assert told.returncode == 0 and "tpugraphs-tile" in told.stdout and "sweep" in told.stdout
