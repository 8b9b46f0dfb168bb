"""Comments, valid values and variants of a config come from where they stand."""

import commands
from flax import traverse_util
import parts
import pytest

from tpugraphs_jax.run import checks, configs

FILE = '''
from ml_collections import ConfigDict
VARIANTS = {"big": "large"}
def get_config(variant=""):
  config = ConfigDict()
  config.seed = 0  # of everything
  # not beside a field
  config.batch = ConfigDict(dict(
      graphs=8, configs=16,  # per graph
      sampling="x # y",
      target=(1,
              2),  # two lines
  ))
  return config
'''


def test_comments_belong_to_the_last_field_of_their_line(tmp_path):
  (tmp_path / "c.py").write_text(FILE)
  assert configs.comments_of(tmp_path / "c.py") == {
      "seed": "of everything", "batch.configs": "per graph", "batch.target": "two lines"}


@pytest.mark.parametrize("kind, variant, expected", [
    ("tile", "ci", ["--config.batch.graphs=10 ", "# kernels per step, over all devices",
                    "--config.model.name=EarlyJoinSAGE", "one of Composed, EarlyJoinSAGE",
                    "  recommended "]),
    ("layout", "gst_ed,ci", ['--config.data.features="(\'released\',)"',
                             "--config.segments.keep=0.5", "skewed, uniform_replacement", "  gst_ed ",
                             "  xla-default "])])
def test_a_config_is_printed_with_values_choices_comments_and_variants(kind, variant, expected):
  config, place = parts.config_of(kind, variant), f"{configs.folder() / kind}.py:{variant}"
  text = configs.described(config, place)
  for part in expected:
    assert part in text
  assert all(len(line) <= 100 for line in text.splitlines() if "#" in line)


def test_every_field_with_few_values_is_a_field_with_one_of_them():
  for kind, variant in (("tile", "ci"), ("layout", "ci"), ("layout", "gst_ed,ci")):
    config = parts.config_of(kind, variant)
    fields = traverse_util.flatten_dict(config.to_dict(), sep=".")
    for field, allowed in checks.choices(config).items():
      assert fields[field] in allowed, field


@pytest.mark.parametrize("kind", ["tile", "layout"])
def test_every_variant_is_listed(kind):
  text = configs.variants(f"{configs.folder() / kind}.py:x")
  (file,) = commands.ROOT.glob(f"configs/{kind}.py")
  assert text.count("\n") >= 8 and f"--config={file.name}:A,B" in text


def test_a_model_named_by_a_flag_brings_its_own_options():
  config = parts.config_of("layout", "xla-random")
  arguments._follow_model(config, ["run_layout.py", "--config.model.name=ResModel"])
  assert config.model.to_dict() == dict(
      name="ResModel", op_embed_dim=32, hidden_dim=32, num_gnns=2, adj_normalization="sym",
      dropout="backpropdropout", config_gain=100.0, remat=False, dtype="float32",
      precision="highest")


@pytest.mark.parametrize("name", ["SAGE", "Nope"])
def test_the_same_or_an_unknown_model_changes_nothing(name):
  config = parts.config_of("layout", "xla-random")
  arguments._follow_model(config, ["run_layout.py", "--config.model.name", name])
  assert config == parts.config_of("layout", "xla-random")


@pytest.mark.parametrize("argv, value, rest", [
    (["x", "--config=a:b", "--y"], "a:b", ["x", "--y"]),
    (["x", "-config", "a", "--config.seed=1"], "a", ["x", "--config.seed=1"]),
    (["x", "--config.seed=1"], None, ["x", "--config.seed=1"])])
def test_the_config_is_taken_in_both_forms_of_a_flag(argv, value, rest):
  assert arguments._take(argv, "config") == (value, rest)


def test_messages_show_no_backslash_before_a_quote():
  assert configs.one_line("bad \\'x\\'\n  of \\\\\"y\\\\\"") == "bad 'x' of \"y\""


def test_a_config_of_ones_own_keeps_the_comments_of_the_project(tmp_path):
  (tmp_path / "own.py").write_text(
      "def get_config(variant=''):\n  config = base()\n  config.seed = 3  # my own\n")
  config = parts.config_of("tile", "ci")
  text = configs.described(config, f"{tmp_path / 'own.py'}:x")
  assert "# my own" in text and "# kernels per step, over all devices" in text
  assert "Variants" not in text


@pytest.mark.parametrize("note, choices, is_repeated", [
    ("or default", ("random", "default"), False), ("of products", ("high", "low"), True)])
def test_values_that_the_comment_names_are_not_repeated(note, choices, is_repeated, monkeypatch):
  config = parts.config_of("layout", "ci")
  monkeypatch.setattr(describe.checks, "choices", lambda fields: {"data.search": choices})
  monkeypatch.setattr(describe, "comments_of", lambda path: {"data.search": note})
  (line,) = [line for line in configs.described(config, "").splitlines() if "data.search" in line]
  assert ("one of" in line) == is_repeated and note in line


@pytest.mark.parametrize("kind, task", [("tile", "tile"), ("layout", "layout")])
def test_the_models_that_can_be_named_are_those_of_the_kind(kind, task):
  config = parts.config_of(kind)
  models = checks.choices(config)["model.name"]
  assert config.task == task and config.model.name in models
  assert ("SAGE" in models) == (kind == "layout") and ("MLP" in models) == (kind == "tile")


def test_options_of_a_model_without_a_default_are_left_out():
  def build(width, depth=2, pooling=["mean"], dtype=None):
    return width, depth, pooling, dtype

  assert arguments._defaults(build) == {"depth": 2, "pooling": ("mean",), "dtype": None}


def test_options_that_are_the_meaning_of_a_name_are_no_options():
  config = parts.config_of("tile", "EarlyJoinSAGE")
  arguments._follow_model(config, ["run_tile.py", "--config.model.name=LateJoinResGCN"])
  assert "early_join" not in config.model and config.model.reduction == "sum"
  assert (config.model.dtype, config.model.precision) == ("float32", "highest")


@pytest.mark.parametrize("text, complaint", [
    ("raise KeyError('x')", "KeyError: 'x'"), ("get_config = 3 +", "SyntaxError"),
    ("def get_config():\n  raise ValueError(repr(repr(\"no 'such' thing\")))", "no 'such' thing")])
def test_a_config_file_that_fails_is_named_in_one_line(tmp_path, text, complaint, capsys):
  (tmp_path / "own.py").write_text(text)
  with pytest.raises(SystemExit) as ended:
    configs.parse_flags(["run_tile.py", f"--config={tmp_path / 'own.py'}"], "tile.py")
  (line,) = capsys.readouterr().err.splitlines()
  assert ended.value.code == 2 and line.startswith("error: ") and complaint in line


@pytest.mark.parametrize("kind, variant", [
    ("tile", "recommended"), ("layout", "xla-random"), ("layout", "tables"), ("layout", "official"),
    ("layout", "gst_efd"), ("layout", "preset=first"), ("tile", "preset=mlsys21")])
def test_every_field_is_described(kind, variant):
  config = parts.config_of(kind, variant)
  lines = configs.described(config, f"{configs.folder() / kind}.py:{variant}").splitlines()
  fields = [n for n, line in enumerate(lines) if line.startswith("--config.")]
  assert len(fields) > 40
  assert not [lines[n] for n in fields if "  # " not in lines[n] + lines[n + 1][:48]]


def test_options_of_a_model_are_described_by_its_docstring_and_those_of_its_bases():
  text = configs.described(parts.config_of("tile", "preset=first"), "")
  assert "model.residual=" in text and "beyond the tables" not in text
  text = configs.described(parts.config_of("tile", "EarlyJoinSAGE"), "")
  assert "rounds of message passing" in text and "# width of every other layer" in text


def test_what_a_field_is_made_of_is_listed():
  text = configs.described(parts.config_of("layout", "ci"), "")
  assert "made of ListMLELoss," in text and "log_offset(K)" in text
  with pytest.raises(ValueError, match="expected one of constant, cosine, multistep"):
    checks.check(parts.config_of("layout", "ci", **{"optimizer.schedule": "linear"}))
