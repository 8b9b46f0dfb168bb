"""What is installed is what is there."""

import configparser

import commands


def test_every_folder_of_the_package_is_installed():
  setup = configparser.ConfigParser()
  setup.read(commands.ROOT / "setup.cfg")
  listed = set(setup["options"]["packages"].split())
  package = commands.ROOT / "tpugraphs_jax"
  folders = {".".join(path.parent.relative_to(commands.ROOT).parts)
             for path in package.rglob("*.py")}
  assert listed == folders | {"tpugraphs_jax.configs"}
  assert (package / "py.typed").exists() and "py.typed" in setup["options.package_data"][
      "tpugraphs_jax"]
