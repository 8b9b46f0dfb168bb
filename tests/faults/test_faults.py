"""The short form of the campaign: a few faults of each kind, none lost, hung or silent."""

from pathlib import Path
import re
import subprocess
import sys

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import campaign
import commands
import hosts
import inputs
import kills
import table

from tpugraphs_jax.data import npz, npz_archive


def run(tmp_path, *arguments):
  out = tmp_path / "table.md"
  failed = campaign.main([*arguments, "--out", str(out)])
  assert failed == 0, out.read_text()
  return out.read_text()


def test_killed_builders_leave_nothing_and_lose_nothing(tmp_path):
  script = [sys.executable, campaign.__file__, "--parts", "store", "--points", "5"]
  ended = subprocess.run(script, capture_output=True, text=True)  # forks need a fresh process
  assert ended.returncode == 0, ended.stdout + ended.stderr
  assert "| SIGKILL, store build | 50 | 50 |" in ended.stdout


@pytest.mark.parametrize("mode", [kills.MODES[0], kills.MODES[-1]])
def test_killed_runs_go_on_as_if_they_had_not_been(mode, tmp_path):
  assert "SIGKILL" in run(tmp_path, "--parts", "kill", "--modes", mode, "--points", "3")


def test_damaged_files_and_input_end_in_one_line_or_the_same_result():
  # In a process of its own: what Orbax leaves behind damaged checkpoints warns at its end.
  script = [sys.executable, campaign.__file__, "--parts", "damage", "input", "folders",
            "--inputs", "60", "--short"]
  ended = subprocess.run(script, capture_output=True, text=True)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  for row in ("damage, checkpoint", "input, HLO module", "vanish under a run and come back | 2 |"):
    assert row in ended.stdout


def test_downloads_from_a_bad_server_are_right_or_refused_and_go_on(tmp_path):
  assert "| network, download | 31 |" in run(tmp_path, "--parts", "network", "--downloads", "1")


def test_other_numbers_of_devices_go_on_with_the_same_losses(tmp_path):
  assert "(1, 2, 4) | 2 | 2 |" in run(tmp_path, "--parts", "devices", "--short")


def test_numbers_at_their_limits_end_in_one_line_or_in_finite_models(tmp_path):
  assert "| numbers, tile | 4 |" in run(tmp_path, "--parts", "numbers", "--short")


def test_a_limit_on_memory_is_kept_or_named(tmp_path):
  assert "| load, 4 GiB of memory | 3 | 2 | 1 |" in run(tmp_path, "--parts", "load", "--short")


def test_an_array_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
  source = tmp_path / "graph.npz"
  np.savez(source, node_feat=np.zeros((100, 140), np.float32))
  monkeypatch.setattr(npz_archive, "_memory_bytes", lambda: 1000)
  with npz_archive.NpzArchive(source) as archive:
    with pytest.raises(npz.NpzError, match="more than the memory of this machine"):
      archive.read("node_feat")


def test_a_reader_that_never_ends_would_be_noticed(monkeypatch):
  monkeypatch.setattr(inputs, "_SECONDS", 0.1)

  def for_ever():
    while True:
      pass

  assert inputs.outcome(for_ever) == "took more than 0.1 s"


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


@pytest.mark.parametrize("code, said, complaint", [
    (1, "step 3\nerror: process 1 of 2 (host b) is gone: ...\n", ""),
    (None, "step 3", "process 0 still waited after 60 s"),
    (0, "error: process 1 of 2 (host b) is gone", "process 0 ended with 0"),
    (1, "error: process 0 of 2 (host a) is gone", "process 0 ended with 1 and said"),
    (1, "Traceback", "process 0 ended with 1 and said []"),
    (1, "error: process 1 of 2 (host b) is gone\nerror: twice", "process 0 ended with 1"),
])
def test_a_host_that_was_left_has_to_name_the_other_in_one_line(code, said, complaint):
  found = hosts.complaint_of(code, said, gone=1)
  assert found.startswith(complaint) and bool(found) == bool(complaint)


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


def test_what_the_documentation_says_was_tried_was_and_nothing_was_lost():
  rows = table.Kept(Path(__file__).parent / "long_form.json").rows
  page = (commands.ROOT / "docs/reliability.md").read_text()
  assert table.markdown(rows) in page
  assert all(row.tried == row.survived + row.refused and not row.failures for row in rows)
  killed = sum(row.tried for row in rows if row.fault.startswith("SIGKILL"))
  inputs_tried = sum(row.tried for row in rows if row.fault.startswith("input"))
  assert killed >= 1000 and inputs_tried >= 10**6


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
    run(tmp_path, *arguments)
  assert run(tmp_path, *arguments) and len(seen) == 2  # it had not come to its end
  run(tmp_path, *arguments, "--out", str(tmp_path / "other.md"))
  assert len(seen) == 2 and len(table.Kept(tmp_path / "rows.json").rows) == 1
