"""The command of docs/leaderboard.md, on tiny data for a few steps."""

import re
import shlex
import subprocess

from tests.support import commands
from tpugraphs_jax import synthetic
from tpugraphs_jax.leaderboard import __main__ as leaderboard


def test_the_page_names_a_winner_and_a_command_that_trains_it(tmp_path, monkeypatch):
  data_root = synthetic.generate(
    tmp_path / "data", collections=["tile:xla"], limit=4, progress=False
  )
  page = tmp_path / "page.html"
  run = lambda *arguments: commands.run(commands.Run(arguments), home=tmp_path)
  # No kernel has as many configurations as the second ranker asks for.
  options = "--collection=tile:xla --steps=3 --folds=3 --systems MLP MLP+batch.min_configs=100000"
  places = f"--data_root={data_root}", f"--workdir={tmp_path / 'runs'}", f"--page={page}"

  def in_fork(command):
    """A run of the race, which imports nothing again."""
    return subprocess.CompletedProcess(command, run(*command[1:]).code)

  with monkeypatch.context() as patch:
    patch.setattr(subprocess, "run", in_fork)
    assert leaderboard.main([*options.split(), *places]) == 0
  text = page.read_text()
  assert "a test fold, over folds" in text and text.count("--config.data.folds=3") == 1
  assert "<code>MLP</code> wins" in text
  assert re.search("Not counted: .*min_configs", text)
  command = re.search("<pre>(.*?)</pre>", text, re.S)[1].replace("\\\n", " ")
  script, *flags = shlex.split(command)[1:]
  ended = run(script, *flags, f"--workdir={tmp_path / 'winner'}", "--do=train", "--noreport")
  assert ended.code == 0, ended.err[-3000:]
  log = (tmp_path / "winner" / "summary.json").read_text()
  assert re.search(r'"step": 3\b', log)
