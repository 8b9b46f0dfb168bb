"""The commands: places of data, errors that no config can foresee, and names of files."""

import types

import jax
import numpy as np
import parts
import pytest

from tpugraphs_jax import parallel, remote, submission
from tpugraphs_jax.run import command, results


class Flags(types.SimpleNamespace):
  """As much of absl's flags as `run.main` reads."""

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


@pytest.fixture
def fails(monkeypatch, tmp_path):
  """`fails(error)`: runs the command with a job that ends in this error."""
  values = Flags(workdir=str(tmp_path), data_root="", mode="train", resume=False,
                 coordinator_address=None, ensemble=[], num_processes=None, process_id=None,
                 synthetic=False, print_config=False, report=False, dry_run=False, split=None,
                 compilation_cache=None, config=parts.config_of("tile", ""))
  monkeypatch.setattr(command.flags, "FLAGS", values)
  monkeypatch.setattr(parallel, "use_compilation_cache", lambda folder: None)
  monkeypatch.setattr(command.console, "install", lambda: None)
  monkeypatch.setattr(command, "_config", lambda *args: None)

  def fails(error):
    def job(*args, **options):
      raise error
    monkeypatch.setattr(command.training, "run", job)
    command.main(["run_layout.py"])

  return fails


def test_a_full_device_takes_one_line_that_says_what_takes_less(fails, capsys):
  with pytest.raises(SystemExit) as ended:
    fails(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nallocator report"))
  (line,) = capsys.readouterr().err.splitlines()
  assert ended.value.code == 2
  assert line.startswith("error: RESOURCE_EXHAUSTED: Out of memory; a step takes less with")
  assert "--config.batch.graphs" in line


def test_other_errors_of_the_runtime_keep_their_traceback(fails):
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    fails(jax.errors.JaxRuntimeError("INTERNAL: a defect"))


class Values(types.SimpleNamespace):
  """Flags with values of their own."""

  def __init__(self, **values):
    super().__init__(**dict(workdir="out", data_root=None, synthetic=False, split=None, mode="all") | values)

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


@pytest.mark.parametrize("kind, variant, remedies", [
    ("tile", "", ["tpugraphs_jax.data.download --data_root ~/data/tpugraphs/npz", "--synthetic"]),
    ("layout", "own,recommended", ["--data_root=data/own/npz", "tpugraphs_jax.collect"])])
def test_without_data_the_error_names_the_place_and_what_to_do(
    kind, variant, remedies, monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="no data at ~/data/tpugraphs/npz") as error:
    command._data_of(Values(), parts.config_of(kind, variant), tmp_path)
  assert all(remedy in str(error.value) for remedy in remedies)
  assert not list(tmp_path.iterdir())
  (tmp_path / "data/tpugraphs/npz").mkdir(parents=True)
  assert command._data_of(Values(), parts.config_of(kind), tmp_path) == "~/data/tpugraphs/npz"


@pytest.mark.parametrize("kind, variant, collection", [
    ("tile", "ci", "tile:xla"), ("layout", "nlp-default,ci", "layout:nlp:default"),
    ("layout", "xla-random,gst_ed", "layout:xla:random")])
def test_synthetic_data_are_of_the_collection_that_is_asked_for(
    kind, variant, collection, monkeypatch, tmp_path, capsys):
  made = []
  monkeypatch.setattr(command.synthetic, "generate", lambda folder, **options: made.append(
      (folder, options["collections"], options["scale"])) or folder.mkdir())
  root = command._data_of(Values(synthetic=True), parts.config_of(kind, variant), tmp_path)
  assert root == str(tmp_path / "synthetic/npz")
  assert made == [(tmp_path / "synthetic", [collection], "tiny")]
  assert "measure no real program" in capsys.readouterr().out


def test_a_page_that_cannot_be_drawn_fails_no_run(monkeypatch, tmp_path, capsys, caplog):
  monkeypatch.setattr(command.report, "write", lambda *args: 1 / 0)
  command._write_page(tmp_path)
  assert "no report page could be drawn" in caplog.text

  def missing(*args):
    raise ImportError("matplotlib is missing: pip install it")
  monkeypatch.setattr(command.report, "write", missing)
  command._write_page(tmp_path)
  assert "no report page: matplotlib is missing: pip install it" in capsys.readouterr().out


@pytest.mark.parametrize("split, file", [("test", "results.csv"), ("valid", "results_valid.csv")])
def test_a_ranking_is_named_after_its_split(split, file, tmp_path, capsys):
  graphs = [types.SimpleNamespace(name=name) for name in ("a", "b")]
  asked = []
  data = types.SimpleNamespace(load=lambda root, split: asked.append((root, split)) or graphs)
  ranker = types.SimpleNamespace(
      collection=types.SimpleNamespace(name="tile:xla"),
      scores=lambda graphs, progress: [np.array([0.5, 0.25, 1.0]), np.array([2.0, 1.0])])
  results.predict(data, "root", ranker, tmp_path, split=split)
  assert asked == [("root", split)] and [path.name for path in tmp_path.iterdir()] == [file]
  found = submission.read_results(tmp_path / file)
  assert {name: ranking.tolist() for name, ranking in found.items()} == {
      "tile:xla:a": [1, 0, 2], "tile:xla:b": [1, 0]}
  assert f"ranked 2 {split} graphs" in capsys.readouterr().out


@pytest.mark.parametrize("values, data_root", [
    (dict(data_root="/data"), "/data"), (dict(), "~/data/tpugraphs/npz"),
    (dict(synthetic=True), "made")])
def test_a_dry_run_writes_to_a_folder_that_is_removed(values, data_root, monkeypatch, capsys):
  config = parts.config_of("tile")
  scratches = []

  def lines(config, scratch):
    scratches.append(scratch)
    assert config.data_root == data_root and scratch.is_dir()
    yield "one"
    yield "two"

  monkeypatch.setattr(parallel, "initialize", lambda *args: None)
  monkeypatch.setattr(command.dry_run, "lines", lines)
  monkeypatch.setattr(command, "_synthetic", lambda config, folder: "made")
  command._tell_dry_run(Values(config=config, coordinator_address=None, num_processes=None,
                               process_id=None, **values))
  assert not scratches[0].exists()
  assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


def test_synthetic_data_of_a_remote_run_stay_on_this_machine(monkeypatch, tmp_path):
  monkeypatch.setenv(remote.CACHE, str(tmp_path))
  made = []
  monkeypatch.setattr(command, "_synthetic", lambda config, folder: made.append(folder))
  command._data_of(Values(synthetic=True, workdir="s3://a/run"), None, tmp_path / "scratch")
  command._data_of(Values(synthetic=True, workdir="run"), None, tmp_path / "scratch")
  assert made == [remote.local_of("s3://a/run") / "synthetic", tmp_path / "scratch/synthetic"]
