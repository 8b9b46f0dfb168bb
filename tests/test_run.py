"""What the commands make of errors that no config can foresee."""

import types

import jax
import parts
import pytest

from tpugraphs_jax.run import command
from tpugraphs_jax.train import parallel


class Flags(types.SimpleNamespace):
  """As much of absl's flags as `run.main` reads."""

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


@pytest.fixture
def fails(monkeypatch, tmp_path):
  """`fails(error)`: runs the command with a job that ends in this error."""
  values = Flags(workdir=str(tmp_path), data_root="", mode="train", resume=False,
                 coordinator_address=None, ensemble=[], num_processes=None, process_id=None,
                 synthetic=False, print_config=False, report=False, dry_run=False, split="test")
  monkeypatch.setattr(command.flags, "FLAGS", values)
  monkeypatch.setattr(parallel, "use_compilation_cache", lambda folder: None)
  monkeypatch.setattr(command.console, "install", lambda: None)
  monkeypatch.setattr(command, "_config", lambda *args: None)

  def fails(error):
    def job(*args, **options):
      raise error
    monkeypatch.setattr(command.jobs, "run", job)
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
    super().__init__(**dict(workdir="out", data_root=None, synthetic=False, split="test", mode="all") | values)

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


def test_without_data_the_error_names_place_download_and_a_way_to_try(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  with pytest.raises(FileNotFoundError) as error:
    command._data_of(Values(), parts.config_of("tile"), tmp_path)
  message = str(error.value)
  assert "no data at ~/data/tpugraphs/npz" in message and "--synthetic" in message
  assert "python -m tpugraphs_jax.data.download --data_root ~/data/tpugraphs/npz" in message
  assert not list(tmp_path.iterdir())


def test_the_usual_place_is_taken_when_it_is_there(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "data/tpugraphs/npz").mkdir(parents=True)
  assert command._data_of(Values(), parts.config_of("tile"), tmp_path) == "~/data/tpugraphs/npz"


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


@pytest.mark.parametrize("values, complaint", [
    (dict(workdir=None), "--workdir is missing"),
    (dict(split="valid"), "--split=valid goes with --mode=predict, and --mode is all"),
    (dict(synthetic=True, data_root="x"), "--synthetic makes data of its own")])
def test_places_that_cannot_be_are_refused(values, complaint):
  with pytest.raises(ValueError, match=complaint):
    command._check_flags(Values(**values))


def test_a_page_that_cannot_be_drawn_fails_no_run(monkeypatch, tmp_path, capsys, caplog):
  monkeypatch.setattr(command.report, "write", lambda *args: 1 / 0)
  command._write_page(tmp_path)
  assert "no report page could be drawn" in caplog.text

  def missing(*args):
    raise ImportError("matplotlib is missing: pip install it")
  monkeypatch.setattr(command.report, "write", missing)
  command._write_page(tmp_path)
  assert "no report page: matplotlib is missing: pip install it" in capsys.readouterr().out
