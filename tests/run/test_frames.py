"""A run reads downward: few functions of the project stand between the command and the loss."""

import json

import pytest

from tests.support import commands

MOST = 8
# Runs a command until it traces the loss for the first time; prints the functions on the way.
SCRIPT = """
import json, runpy, sys, traceback
from tpugraphs_jax import losses

package = {package!r}

def loss_sums(*args, **options):
  frames = [f for f in traceback.extract_stack()[:-1] if f.filename.startswith(package)]
  print(json.dumps([f.filename[len(package):] + ":" + f.name for f in frames]))
  raise SystemExit(0)

losses.loss_sums = loss_sums
sys.argv = ["run_layout.py", *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize("variant", ["ci", "gst_ed,ci", "recommended,ci"])
def test_few_functions_stand_between_the_command_and_the_loss(variant, data_root, tmp_path):
  flags = [f"--config={variant}", f"--data_root={data_root}", f"--workdir={tmp_path / 'run'}"]
  flags += [f"--config.data.store_dir={tmp_path / 'store'}", "--noreport"]
  script = SCRIPT.format(
    package=f"{commands.ROOT / 'tpugraphs_jax'}/",
    arguments=flags,
    script=str(commands.ROOT / "run_layout.py"),
  )
  ended = commands.run(commands.Run(["-c", script]), home=tmp_path)
  assert ended.code == 0, ended.err
  frames = json.loads(ended.out.splitlines()[-1])
  *way, loss = frames
  assert way[0] == "run/command.py:layout" and loss.startswith("train/step.py:loss_fn"), frames
  assert len(way) <= MOST, way
