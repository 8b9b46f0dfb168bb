"""The short form of the campaign, killed runs, and the table that campaigns keep."""

from pathlib import Path
import subprocess
import sys

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import campaign
import kills
import table


def test_killed_builders_leave_nothing_and_lose_nothing(tmp_path):
  script = [sys.executable, campaign.__file__, "--parts", "store", "--points", "5"]
  ended = subprocess.run(script, capture_output=True, text=True)  # forks need a fresh process
  assert ended.returncode == 0, ended.stdout + ended.stderr
  assert "| SIGKILL, store build | 50 | 50 |" in ended.stdout


@pytest.mark.parametrize("mode", [kills.MODES[0], kills.MODES[-1]])
def test_killed_runs_go_on_as_if_they_had_not_been(mode, capsys):
  assert campaign.main(["--parts", "kill", "--modes", mode, "--points", "3"]) == 0
  assert f"| SIGKILL, {mode} | 3 | 3 |" in capsys.readouterr().out


class FakeKills:
  """Kills of which every tenth loses something."""

  def __init__(self):
    self.row, self.draws = table.Row("SIGKILL, nothing"), []

  def try_points(self, points, rng):
    for _ in range(points):
      self.draws.append(int(rng.integers(10**9)))
      self.row.count("survived" if self.row.tried % 10 != 9 else "lost", of=f"{self.row.tried}")


def test_kills_go_on_where_an_earlier_campaign_was_stopped(tmp_path):
  path, drawn = tmp_path / "rows.json", []
  for points in (7, 23, 23):
    kept, killed = table.Kept(path), FakeKills()
    for row in campaign._extend(killed, kept, points, (0, 1)):
      kept.add(row)
    drawn += killed.draws
  assert len(drawn) == len(set(drawn)) == 23
  (row,) = table.Kept(path).rows
  assert (row.fault, row.tried, row.survived) == ("SIGKILL, nothing", 23, 21)
  assert row.failures == ["9: lost", "19: lost"]


def test_parts_that_have_been_tried_are_not_tried_again(tmp_path, monkeypatch):
  arguments = ["--parts", "network", "--downloads", "1", "--kept", str(tmp_path / "rows.json")]
  seen = []

  def fail_once(args, folder, data_root):
    seen.append(1)
    yield table.Row("network, download", tried=1, survived=1)
    if len(seen) == 1:
      raise KeyboardInterrupt
  monkeypatch.setattr(campaign, "_network", fail_once)
  with pytest.raises(KeyboardInterrupt):
    campaign.main(arguments)
  assert campaign.main(arguments) == 0 and len(seen) == 2  # it had not come to its end
  campaign.main(arguments)
  assert len(seen) == 2 and len(table.Kept(tmp_path / "rows.json").rows) == 1


def test_campaigns_with_other_seeds_add_up(tmp_path, capsys):
  kept = [table.Kept(tmp_path / name) for name in "ab"]
  kept[0].add(table.Row("a", 3, 1, 2))
  kept[0].add(table.Row("b", 5, 5, 0))
  kept[1].add(table.Row("b", 2, 1, 0, ["lost"]))
  add = ["--add", str(tmp_path / "a"), str(tmp_path / "b")]
  assert campaign.main([*add, "--kept", str(tmp_path / "sums")]) == 1  # of them went wrong
  assert capsys.readouterr().out.splitlines()[4:] == [
      "| a | 3 | 2 | 1 | 0 |", "| b | 7 | 0 | 6 | 1 |", "- lost", ""]
  assert [row.tried for row in table.Kept(tmp_path / "sums").rows] == [3, 7]
  with pytest.raises(SystemExit):
    campaign.main([*add, str(tmp_path / "nothing")])
  assert f"no rows were kept in {tmp_path / 'nothing'}" in capsys.readouterr().err
