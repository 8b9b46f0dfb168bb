"""Configs by file, by variant and by flag, and how they are printed."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import commands, parts
from tpugraphs_jax import config_fields
from tpugraphs_jax.infra import trust
from tpugraphs_jax.rankers import base
from tpugraphs_jax.rankers.config import Config, Model
from tpugraphs_jax.run import configs


@pytest.mark.parametrize(
  "value, expected",
  [
    ("xla-random,gst_ed", ("layout.py", "xla-random,gst_ed")),
    ("ci", ("layout.py", "ci")),
    ("layout.py:ci", ("layout.py", "ci")),
    ("configs/tile.py:MLP", ("tile.py", "MLP")),
    ("tile.py", ("tile.py", "")),
  ],
)
def test_a_value_names_a_file_and_a_variant(value, expected, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)  # where no such file is
  file, _, variant = configs.resolve(value, "layout.py").partition(":")
  assert (Path(file).name, variant) == expected and Path(file).is_file()


_RAISES = "raise RuntimeError('this file ran')\n"


@pytest.mark.parametrize("name", ["tile.py", "layout.py"])
def test_a_bare_name_is_the_projects_whatever_the_current_folder_has(monkeypatch, tmp_path, name):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_text(_RAISES)
  for value in (name, f"{name}:ci"):
    assert configs.resolve(value) == f"{configs.folder()}/{value}"
    assert configs.resolve(configs.resolve(value)) == configs.resolve(value)
  assert configs.load(f"{name}:ci").task and configs.load(name).task
  assert name in configs.variants(configs.resolve(name))


@pytest.mark.parametrize(
  "place", ["./tile.py", "mine/tile.py", "configs/tile.py", "{folder}/tile.py"]
)
def test_a_path_with_a_separator_is_the_users(monkeypatch, tmp_path, place):
  monkeypatch.chdir(tmp_path)
  place = place.format(folder=tmp_path)
  Path(place).parent.mkdir(exist_ok=True)
  Path(place).write_text(
    "from tpugraphs_jax.run import configs\n\n\n"
    "def get_config(variant='MLP'):\n"
    "  return configs.load(f'tile.py:{variant}').replace(seed=7)\n"
  )
  assert configs.resolve(f"{place}:x") == f"{place}:x"
  assert configs.load(f"{place}:ci").seed == 7
  assert configs.load(place).model.name == "MLP"


def test_a_bare_name_of_no_config_of_the_project_runs_no_file_and_says_how_to_name_it(
  monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "my_config.py").write_text(_RAISES)
  with pytest.raises(FileNotFoundError, match=r"\./my_config\.py"):
    configs.load("my_config.py:ci")


@pytest.mark.parametrize("kind, do", [("tile", "evaluate"), ("layout", "predict")])
def test_no_command_runs_a_config_file_that_is_not_named(tmp_path, kind, do):
  (tmp_path / f"{kind}.py").write_text(_RAISES)
  command = [commands.ROOT / f"run_{kind}.py", f"--do={do}", "--workdir=."]
  ended = commands.run(commands.Run(command, folder=str(tmp_path)), home=tmp_path)
  assert ended.code == 2 and "config.json is missing" in ended.err
  assert "this file ran" not in ended.out + ended.err


@pytest.mark.parametrize(
  "message, expected",
  [
    ("batch.graphs is 0", "--config.batch.graphs is 0"),
    (
      "lower optimizer.learning_rate or set optimizer.clip_norm",
      "lower --config.optimizer.learning_rate or set --config.optimizer.clip_norm",
    ),
    ("data.npz is damaged", "data.npz is damaged"),
    ("out/model.npz is missing", "out/model.npz is missing"),
    (
      "train.nope is no field, a/train.epochs neither",
      "train.nope is no field, a/train.epochs neither",
    ),
    ("--config.batch.graphs stays", "--config.batch.graphs stays"),
    ("(data.skip_bad_files=True)", "(--config.data.skip_bad_files=True)"),
  ],
)
def test_fields_in_a_message_become_flags_and_nothing_else_does(message, expected):
  assert configs.as_flags(message, configs.load("layout.py")) == expected


@pytest.mark.parametrize(
  "kind, variant, expected",
  [
    (
      "tile",
      "ci",
      [
        "--config.batch.graphs=10 ",
        "# [default 8] graphs per step, over all",
        "--config.model.name=EarlyJoinSAGE",
        "one of ",
        ", LateJoinSAGE,",
        "  recommended ",
      ],
    ),
    (
      "layout",
      "gst_ed,ci",
      [
        "--config.data.features=\"('released',)\"",
        "--config.segments.keep=0.5",
        "uniform_replacement",
        "  gst_ed ",
        "  xla-default ",
      ],
    ),
  ],
)
def test_a_config_is_printed_with_values_choices_comments_and_variants(kind, variant, expected):
  config, place = parts.config_of(kind, variant), f"{configs.folder() / kind}.py:{variant}"
  text = configs.listing(config, place)
  for part in expected:
    assert part in text
  assert all(len(line) <= 100 for line in text.splitlines() if "#" in line)


@pytest.mark.parametrize(
  "text, complaint",
  [
    ("raise KeyError('x')", "KeyError: 'x'"),
    ("get_config = 3 +", "SyntaxError"),
    ("def get_config(variant=''):\n  return nothing", "own.py: NameError"),
    ("config = {}", "no function get_config"),
    ("def get_config():\n  return {'seed': 3}", "returns a dict, expected a Config"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("def get_config():\n  raise ValueError(repr(repr(\"no 'such' thing\")))", "no 'such' thing"),
  ],
)
def test_a_config_file_that_fails_is_named_in_one_line(tmp_path, text, complaint, capsys):
  (tmp_path / "own.py").write_text(text)
  with pytest.raises(SystemExit) as ended:
    configs.parse_flags(["run_tile.py", f"--config={tmp_path / 'own.py'}"], "tile.py")
  (line,) = capsys.readouterr().err.splitlines()
  assert ended.value.code == 2 and line.startswith("error: ") and complaint in line


@pytest.mark.parametrize(
  "kind, variant",
  [
    ("tile", "recommended"),
    ("layout", "xla-random"),
    ("layout", "tables"),
    ("layout", "official"),
    ("layout", "gst_efd"),
    ("layout", "preset=first"),
    ("tile", "preset=mlsys21"),
  ],
)
def test_every_field_is_described(kind, variant):
  config = parts.config_of(kind, variant)
  lines = configs.listing(config, f"{configs.folder() / kind}.py:{variant}").splitlines()
  fields = [n for n, line in enumerate(lines) if line.startswith("--config.")]
  assert len(fields) > 40
  assert not [lines[n] for n in fields if "  # " not in lines[n] + lines[n + 1][:48]]


@pytest.mark.parametrize(
  "kind, variant, name",
  [("layout", "xla-random", "ResModel"), ("tile", "EarlyJoinSAGE", "LateJoinResGCN")],
)
def test_another_model_has_its_own_options_at_their_defaults(kind, variant, name):
  flags = ["run", "--config.model.name", name, "rest"]
  by_flag, changes, rest = configs.with_flags(f"{kind}.py:{variant}", flags)
  in_python = parts.config_of(kind, variant, **{"model.dtype": "bfloat16"})
  in_python = in_python.replace(model__name=name)
  assert in_python.model == Model(name, kind=kind) == by_flag.model
  assert (changes["model.name"], rest) == (name, ["run", "rest"])
  assert "early_join" not in by_flag.model.options  # the name implies it
  in_python = in_python.replace(model__name=name, model__hidden_dim=8)
  assert in_python.model.hidden_dim == 8


def test_another_model_can_be_one_of_an_extension(tmp_path, monkeypatch):
  (tmp_path / "wide_ranker.py").write_text(
    "from tpugraphs_jax.config_fields import option\n"
    "from tpugraphs_jax.rankers import base\n\n\n"
    "@base.LAYOUT_MODELS.register('WideRanker')\n"
    "class WideRanker(base.Network):\n"
    "  width: int = option(7, 'width of nodes', least=1, most=2**22)\n"
    "  depth: int = 2\n"
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(base.LAYOUT_MODELS, "WideRanker", None)  # forgotten after the test
  config = parts.config_of("layout", "full,ci")
  changes = {"extensions": ("wide_ranker",), "model.name": "WideRanker"}
  config = config.replace(**changes | {"model.width": 2**22})
  assert config.model.to_dict() == dict(
    name="WideRanker", width=2**22, depth=2, precision="highest"
  )
  sent = trust.config(json.loads(json.dumps(config.to_dict())))
  assert Config.from_dict(sent) == config  # as of a file
  assert "# [default 7] width of nodes" in configs.listing(config, "layout.py:full,ci")
  for field, value in (("width", 2**22 + 1), ("depth", config_fields.MOST + 1)):
    with pytest.raises(ValueError, match=f"model.{field} is {value}, expected at "):
      config.replace(**{f"model.{field}": value})


def test_values_of_numpy_are_taken_where_they_are_exact():
  config = parts.config_of("tile", "ci")
  config = config.replace(
    seed=np.int64(3),
    train__quick_compile=np.bool_(False),
    optimizer__learning_rate=np.float32(0.5),
    optimizer__average_window=np.array([0.5, 1.0]),
    data__fit_splits=["train"],
  )
  assert (
    json.loads(json.dumps(config.to_dict()))["seed"] == 3 and config.train.quick_compile is False
  )
  assert config.optimizer.learning_rate == 0.5
  assert config.optimizer.average_window == (0.5, 1.0) and config.data.fit_splits == ("train",)
  for name, value in (
    ("batch.graphs", np.float64(4)),
    ("batch.graphs", True),
    ("data.fit_splits", "train"),
    ("train.quick_compile", 1),
  ):
    with pytest.raises(ValueError, match=f"^{name} is "):
      config.replace(**{name: value})
