"""The short fault campaign: killed runs and store builds end as if they had not been killed."""

import pytest

from tests.support import commands
from tools.faults import campaign, kills


def test_killed_builders_leave_nothing_and_lose_nothing():
  # Forks need a fresh process.
  ended = commands.python(campaign.__file__, "--parts", "store", "--points", 2)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  assert "| SIGKILL, store build | 20 | 20 |" in ended.stdout


@pytest.mark.parametrize("mode", [kills.MODES[0], kills.MODES[-1]])
def test_killed_runs_go_on_as_if_they_had_not_been(mode, capsys):
  assert campaign.main(["--parts", "kill", "--modes", mode, "--points", "3"]) == 0
  assert f"| SIGKILL, {mode} | 3 | 3 |" in capsys.readouterr().out
