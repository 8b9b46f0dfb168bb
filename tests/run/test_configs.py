"""Configs by file, by variant alone, and their fields as the flags that set them."""

from pathlib import Path

import commands
import pytest

from tpugraphs_jax.run import configs


@pytest.mark.parametrize("value, expected", [
    ("xla-random,gst_ed", ("layout.py", "xla-random,gst_ed")),
    ("ci", ("layout.py", "ci")),
    ("layout.py:ci", ("layout.py", "ci")),
    ("configs/tile.py:MLP", ("tile.py", "MLP")),
    ("tile.py", ("tile.py", "")),
])
def test_a_value_names_a_file_and_a_variant(value, expected, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)  # where no such file is
  file, _, variant = configs.resolve(value, "layout.py").partition(":")
  assert (Path(file).name, variant) == expected and Path(file).is_file()


def test_a_file_of_the_users_comes_before_the_projects(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tile.py").write_text("def get_config(variant=''):\n  return {'mine': variant}\n")
  assert configs.resolve("tile.py:x", "tile.py") == "tile.py:x"
  assert configs.load("tile.py:x") == {"mine": "x"}
  assert configs.load("tile.py") == {"mine": ""}


def test_the_projects_files_are_found_from_any_folder(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  assert configs.folder() == commands.ROOT / "configs"
  assert configs.load("tile.py:MLP").model.name == "MLP"


def test_a_file_that_is_not_there_says_which_there_are(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(FileNotFoundError, match="nope.py is missing: .*layout.py, tile.py"):
    configs.load("nope.py:x")


@pytest.mark.parametrize("message, expected", [
    ("batch.graphs is 0", "--config.batch.graphs is 0"),
    ("lower optimizer.learning_rate or set optimizer.clip_norm",
     "lower --config.optimizer.learning_rate or set --config.optimizer.clip_norm"),
    ("data.npz is damaged", "data.npz is damaged"),
    ("out/model.npz is missing", "out/model.npz is missing"),
    ("train.nope is no field, a/train.epochs neither", "train.nope is no field, a/train.epochs"
     " neither"),
    ("--config.batch.graphs stays", "--config.batch.graphs stays"),
    ("(data.skip_bad_files=True)", "(--config.data.skip_bad_files=True)"),
])
def test_fields_in_a_message_become_flags_and_nothing_else_does(message, expected):
  assert configs.as_flags(message, configs.load("layout.py")) == expected


def test_without_a_config_a_message_stays_as_it_is():
  assert configs.as_flags("batch.graphs is 0", None) == "batch.graphs is 0"
