"""The short fault campaign: a few faults of each kind; no run is lost, hangs or fails silently.

Killed runs are in `test_kills.py`.
"""

from tests.support import commands
from tools.faults import campaign


def run(tmp_path, *arguments):
  out = tmp_path / "table.md"
  failed = campaign.main([*arguments, "--out", str(out)])
  assert failed == 0, out.read_text()
  return out.read_text()


def test_damaged_files_and_what_somebody_sends_are_read_or_end_in_one_line():
  # In a process of its own: Orbax warns at exit after damaged checkpoints.
  options = "--parts damage input folders sent --inputs 60 --sent 8 --short"
  ended = commands.python(campaign.__file__, *options.split())
  assert ended.returncode == 0, ended.stdout + ended.stderr
  for row in (
    "damage, checkpoint",
    "input, HLO module",
    "vanish under a run and come back | 2 |",
    "sent, model file | 8",
    "sent, working folder for a report | 8",
    "sent, graph file | 40",
    "sent, labels of collect | 800",
    "sent, HLO text | 3",
  ):
    assert row in ended.stdout


def test_downloads_from_a_bad_server_are_right_or_refused_and_go_on(tmp_path):
  assert "| network, download | 29 |" in run(tmp_path, "--parts", "network", "--downloads", "1")


def test_other_numbers_of_devices_go_on_with_the_same_losses(tmp_path):
  assert "(1, 2, 4) | 2 | 2 |" in run(tmp_path, "--parts", "devices", "--short")


def test_numbers_at_their_limits_end_in_one_line_or_in_finite_models(tmp_path):
  assert "| numbers, tile | 4 |" in run(tmp_path, "--parts", "numbers", "--short")


def test_a_limit_on_memory_is_kept_or_named(tmp_path):
  assert "| load, 4 GiB of memory | 3 | 2 | 1 |" in run(tmp_path, "--parts", "load", "--short")
