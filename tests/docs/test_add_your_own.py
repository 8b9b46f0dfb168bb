"""The recipes of docs/add_your_own.md and docs/add_parts.md run as they stand, on tiny data."""

import os
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest

from tests.support import commands
import tpugraphs_jax
from tpugraphs_jax import submission
from tpugraphs_jax.data import npz

TEXT = "".join(
  (commands.ROOT / "docs" / name).read_text() for name in ("add_your_own.md", "add_parts.md")
)
RECIPES = (
  "A model",
  "A family",
  "A published system",
  "A pooling",
  "A loss",
  "A block of node features",
  "A collection",
)
# Quick runs; these flags change nothing that the recipes show.
_SMALL = {
  "tpugraphs-layout": (
    "xla-random",
    "--config.train.epochs=1 --config.batch.slates_per_epoch=8 "
    "--config.batch.configs=4 --config.model.hidden_dim=8 "
    "--config.model.num_gnns=1 --config.train.valid_configs=20",
  ),
  "tpugraphs-tile": (
    "EarlyJoinSAGE",
    "--config.train.epochs=1 --config.batch.slates_per_epoch=20"
    " --config.model.hidden_dim=8 --config.model.num_gnns=1",
  ),
}


def recipe(title):
  """The files and the shell commands of one section."""
  section = re.search(rf"^## {title}\n(.*?)(?=^## |^# Add |\Z)", TEXT, re.M | re.S)[1]
  blocks = re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S)
  files = {
    code.split("\n")[0].removeprefix("# "): code for kind, code in blocks if kind == "python"
  }
  lines = [line for kind, code in blocks if kind == "sh" for line in code.splitlines()]
  return files, lines


def small(line, data_root):
  """The command of a line, on tiny data where it trains."""
  command, *arguments = shlex.split(line)
  if command == "python":
    return arguments
  script = commands.ROOT / f"run_{command.removeprefix('tpugraphs-')}.py"
  default, flags = _SMALL[command]
  if "--do=evaluate" not in arguments:
    if not any(argument.startswith("--config=") for argument in arguments):
      arguments.insert(0, f"--config={default}")
    arguments += [
      flag
      for flag in flags.split()
      if "model." not in flag
      or not any(word in given for given in arguments for word in ("family", "system"))
    ]
    if any("gst" in argument for argument in arguments):
      arguments.append("--config.segments.max_nodes=60")
  # The data that `--synthetic` would make, once for all recipes.
  arguments = [argument for argument in arguments if argument != "--synthetic"]
  if not any(argument.startswith("--data_root=") for argument in arguments):
    arguments.append(f"--data_root={data_root}")
  arguments.append("--noreport")  # a page takes longer than such a run
  return [script, *arguments]


def run(arguments, folder):
  ended = commands.run(commands.Run(arguments, folder=str(folder)), home=folder)
  assert ended.code == 0, ended.out[-2000:] + ended.err[-3000:]
  return ended.out


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs_as_it_is_written(title, data_root, tmp_path, monkeypatch):
  files, lines = recipe(title)
  assert files and lines
  for name, code in files.items():
    (tmp_path / name).write_text(code)
  for line in lines:
    run(small(line, data_root), tmp_path)
  workdirs = [path.parent for path in tmp_path.glob("out/*/config.json")]
  assert workdirs
  for workdir in workdirs:
    assert submission.HEADER in (workdir / "results.csv").read_text()
    assert (workdir / "model.npz").exists()
  if title == "A published system":
    shown = run(
      [commands.ROOT / "run_layout.py", "--config=./my_system.py", "--print_config"], tmp_path
    )
    assert "--config.model.width=16" in shown and "width of node features" in shown
    monkeypatch.chdir(tmp_path)  # in one process a file can be loaded again
    first, second = (tpugraphs_jax.load_config("./my_system.py:nlp-default") for _ in range(2))
    assert first == second and first.data.source == "nlp"
  if title == "A model":
    monkeypatch.chdir(tmp_path)
    graph = npz.read_layout(npz.split_files(data_root, "layout:xla:random", "test")[0])
    ranker = tpugraphs_jax.load("out/mine", extensions=["my_ranker"])
    order, _ = tpugraphs_jax.rank(ranker, graph)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(graph.configs)))


def patches_of(section):
  """The patches of a section."""
  text = re.search(rf"^## {section}\n(.*?)(?=^## |^# Add |\Z)", TEXT, re.M | re.S)[1]
  return re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)


USED = """
from tpugraphs_jax.run import configs
config = configs.load("layout.py:full,ci")
print(configs.listing(config, "layout.py:full,ci"))
for field in ("model.score_scale", "loss.label_shift"):
  try:
    config.replace(**{field: -1.0})
  except ValueError as error:
    print("refused:", error)
"""


def test_an_option_of_a_network_or_a_loss_is_a_change_of_one_file(tmp_path):
  for folder in ("tpugraphs_jax", "configs"):
    shutil.copytree(commands.ROOT / folder, tmp_path / folder)
  patches = patches_of("An option of the project's code")
  assert [patch.count("+++ b/") for patch in patches] == [1, 1]
  for patch in patches:
    subprocess.run(["git", "apply"], cwd=tmp_path, input=patch, text=True, check=True)
  environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
  ended = commands.python("-c", USED, cwd=tmp_path, env=environment)
  assert ended.returncode == 0, ended.stderr
  told = ended.stdout
  assert "--config.model.score_scale=1.0" in told and "factor of the scores" in told
  assert "--config.loss.label_shift=0.0" in told and "number that MSE adds" in told
  for field in ("model.score_scale", "loss.label_shift"):
    assert f"refused: {field} is -1.0, expected" in told
