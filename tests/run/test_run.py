"""The commands: places of data, errors that no config can foresee, and names of files."""

import types

import jax
import parts
import pytest

from tpugraphs_jax import parallel
from tpugraphs_jax.run import command


class Flags(types.SimpleNamespace):
  """As much of absl's flags as the command reads."""

  def __init__(self, **values):
    super().__init__(**dict(
        workdir="out", data_root=None, synthetic=False, split=None, mode="all") | values)

  def __getitem__(self, name):
    return types.SimpleNamespace(value=getattr(self, name))


@pytest.fixture
def fails(monkeypatch, tmp_path):
  """`fails(error)`: runs the command with a job that ends in this error."""
  values = Flags(workdir=str(tmp_path), data_root="", resume=False, coordinator_address=None,
                 ensemble=[], num_processes=None, process_id=None, print_config=False,
                 report=False, dry_run=False, compilation_cache=None,
                 config=parts.config_of("tile", ""))
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


@pytest.mark.parametrize("kind, variant, remedies", [
    ("tile", "", ["tpugraphs_jax.data.download --data_root ~/data/tpugraphs/npz", "--synthetic"]),
    ("layout", "own,recommended", ["--data_root=data/own/npz", "tpugraphs_jax.collect"])])
def test_without_data_the_error_names_the_place_and_what_to_do(
    kind, variant, remedies, monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="no data") as error:
    command._data_of(Flags(), parts.config_of(kind, variant), tmp_path)
  assert all(remedy in str(error.value) for remedy in remedies)
  assert not list(tmp_path.iterdir())
  (tmp_path / "data/tpugraphs/npz").mkdir(parents=True)
  assert command._data_of(Flags(), parts.config_of(kind), tmp_path) == "~/data/tpugraphs/npz"


def test_a_page_that_cannot_be_drawn_fails_no_run(monkeypatch, tmp_path, capsys, caplog):
  monkeypatch.setattr(command.report, "write", lambda *args: 1 / 0)
  command._write_page(tmp_path)
  assert "no report page could be drawn" in caplog.text

  def missing(*args):
    raise ImportError("matplotlib is missing: pip install it")
  monkeypatch.setattr(command.report, "write", missing)
  command._write_page(tmp_path)
  assert "no report page: matplotlib is missing: pip install it" in capsys.readouterr().out
