"""What the commands make of errors that no config can foresee."""

import types

import jax
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
                 synthetic=False, print_config=False, report=False)
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
