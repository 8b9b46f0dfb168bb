"""The installed package is complete, and its commands refuse wrong usage."""

import configparser

import pytest

from tests.support import commands


def test_every_folder_of_the_package_is_installed():
  setup = configparser.ConfigParser()
  setup.read(commands.ROOT / "setup.cfg")
  listed = set(setup["options"]["packages"].split())
  package = commands.ROOT / "tpugraphs_jax"
  folders = {
    ".".join(path.parent.relative_to(commands.ROOT).parts) for path in package.rglob("*.py")
  }
  assert listed == folders | {"tpugraphs_jax.configs", "tpugraphs_jax.configs.systems"}
  assert (package / "py.typed").exists() and "py.typed" in setup["options.package_data"][
    "tpugraphs_jax"
  ]


@pytest.mark.parametrize(
  "command",
  [
    "tile",
    "data.store build --data_root none",
    "synthetic --out x --scale none",
    "collect --programs none.py --label measured --out x --collection layout:own:a",
    "estimate none.py:step",
    "tune_tiles none.py:kernel",
    "hlo show none.pb",
    "submission combine --out x none.csv",
    "report none",
    "data.download --collections tile:none",
  ],
)
def test_wrong_usage_of_a_command_ends_in_code_2_and_an_error(command, tmp_path, tmp_path_factory):
  module, *arguments = command.split()
  names = [f"tpugraphs_jax.{module}"] if arguments else ["tpugraphs_jax", module]
  ended = commands.run(
    commands.Run(["-m", *names, *arguments], folder=str(tmp_path)),
    home=tmp_path_factory.mktemp("home"),
  )
  assert ended.code == 2, ended.err
  assert "error: " in ended.err.splitlines()[-1] and not list(tmp_path.iterdir())
