"""Lines are whole, carry a time where nobody is watching, and warnings stand apart."""

import ast
import io
import logging
from pathlib import Path
import re

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


def test_every_progress_bar_of_the_package_is_left_out_off_a_terminal():
  """Either by `console.bar`, or by the value that tqdm has for this."""
  package, found = Path(console.__file__).parent, []
  for path in package.rglob("*.py"):
    tree = ast.parse(path.read_text())
    kept = {ast.unparse(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign)
            and ast.unparse(node.value).startswith("console.bar(")}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
      if ast.unparse(call.func) in ("tqdm.tqdm", "tqdm"):
        disable = {word.arg: ast.unparse(word.value) for word in call.keywords}.get("disable", "")
        is_hidden = disable == "None" or disable in kept or disable.startswith("console.bar(")
        found.append((path.name, is_hidden))
  assert len(found) > 5 and all(is_hidden for _, is_hidden in found), found


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
