"""The commands: places of data, and pages that cannot be drawn."""

import types

import parts
import pytest

from tpugraphs_jax.run import command


FLAGS = types.SimpleNamespace(workdir="out", synthetic=False)  # as far as the place of data needs


@pytest.mark.parametrize("kind, variant, remedies", [
    ("tile", "", ["tpugraphs_jax.data.download --data_root ~/data/tpugraphs/npz", "--synthetic"]),
    ("layout", "own,recommended", ["--data_root=data/own/npz", "tpugraphs_jax.collect"])])
def test_without_data_the_error_names_the_place_and_what_to_do(
    kind, variant, remedies, monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="no data") as error:
    command._data_of(FLAGS, parts.config_of(kind, variant), tmp_path)
  assert all(remedy in str(error.value) for remedy in remedies)
  assert not list(tmp_path.iterdir())
  (tmp_path / "data/tpugraphs/npz").mkdir(parents=True)
  assert command._data_of(FLAGS, parts.config_of(kind), tmp_path) == "~/data/tpugraphs/npz"


def test_a_page_that_cannot_be_drawn_fails_no_run(monkeypatch, tmp_path, capsys, caplog):
  monkeypatch.setattr(command.report, "write", lambda *args: 1 / 0)
  command._write_page(tmp_path)
  assert "no report page could be drawn" in caplog.text

  def missing(*args):
    raise ImportError("matplotlib is missing: pip install it")
  monkeypatch.setattr(command.report, "write", missing)
  command._write_page(tmp_path)
  assert "no report page: matplotlib is missing: pip install it" in capsys.readouterr().out
