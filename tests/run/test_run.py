"""Where the commands look for data."""

import types

import pytest

from tests.support import parts
from tpugraphs_jax.run import launch

FLAGS = types.SimpleNamespace(workdir="out", synthetic=False)  # flags that place the data


@pytest.mark.parametrize(
  "kind, variant, remedies",
  [
    ("tile", "", ["tpugraphs_jax.data.download --data_root ~/data/tpugraphs/npz", "--synthetic"]),
    ("layout", "own,recommended", ["--data_root=data/own/npz", "tpugraphs_jax.collect"]),
  ],
)
def test_without_data_the_error_names_the_place_and_what_to_do(
  kind, variant, remedies, monkeypatch, tmp_path
):
  monkeypatch.setenv("HOME", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="no data") as error:
    launch._default_data_root(FLAGS, parts.config_of(kind, variant))
  assert all(remedy in str(error.value) for remedy in remedies)
  assert not list(tmp_path.iterdir())
  (tmp_path / "data/tpugraphs/npz").mkdir(parents=True)
  assert launch._default_data_root(FLAGS, parts.config_of(kind)) == "~/data/tpugraphs/npz"
