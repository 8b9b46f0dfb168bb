"""Training from Python, and going on with a run by its folder alone."""

import pytest

from tests.support import small_runs
import tpugraphs_jax
from tpugraphs_jax.run import python
from tpugraphs_jax.run.python import Run

FEW = dict(train__epochs=2, batch__slates_per_epoch=20, batch__graphs=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = str(tmp_path_factory.mktemp("python") / "run")
  options = dict(data_root=small_runs.all_runs().data_root, workdir=workdir, seed=3, **FEW)
  return tpugraphs_jax.train_model("tile.py:ci", **options)


def test_a_run_has_metrics_a_model_and_a_report(run):
  assert 0 <= run.metrics["slowdown1_mean"] and "slowdown1_mean" in repr(run)
  assert run.model.collection.name == "tile:xla" and run.model.config.seed == 3
  file = tpugraphs_jax.load(run.workdir / "model.npz")  # judged on the sample of training
  assert set(file.metrics) <= set(run.metrics) and 0 <= file.metrics["slowdown1_mean"]
  assert 0 < tpugraphs_jax.load("layout-v3-estimate").metrics["kendaltau"] < 1
  assert run.report().read_text().startswith("<!")


def test_a_second_run_in_the_folder_is_refused_unless_it_goes_on(run):
  options = dict(data_root=small_runs.all_runs().data_root, workdir=run.workdir, seed=3, **FEW)
  with pytest.raises(ValueError, match="resume=True"):
    tpugraphs_jax.train_model("tile.py:ci", **options)
  again = tpugraphs_jax.train_model("tile.py:ci", resume=True, **options)
  assert again.metrics == run.metrics


def test_all_steps_are_one_run(monkeypatch, tmp_path):
  runs = []
  monkeypatch.setattr(python.training, "run", lambda *_, **options: runs.append(options))
  for predict, do in ((False, ["train", "evaluate"]), (True, ["train", "evaluate", "predict"])):
    tpugraphs_jax.train_model("tile.py:ci", data_root="x", workdir=tmp_path, predict=predict)
    assert runs.pop() == dict(do=do, resume=False) and not runs


def test_a_metric_that_is_no_number_is_left_out_of_the_text_of_a_run(tmp_path):
  (tmp_path / "summary.json").write_text(
    '{"validation": {"metrics": {"kendaltau_mean": null, "opa_pooled": 0.5}}}'
  )
  run = Run(tmp_path)
  assert run.metrics["kendaltau_mean"] is None and "opa_pooled 0.5000" in repr(run)


def test_an_unknown_field_and_a_missing_file_are_refused(tmp_path):
  with pytest.raises(ValueError, match="train.epochs"):
    tpugraphs_jax.train_model("tile.py:ci", data_root="x", workdir=tmp_path, train__epoch=2)
  with pytest.raises(FileNotFoundError, match="no config file.*own.py"):
    tpugraphs_jax.train_model(tmp_path / "own.py", data_root="x", workdir=tmp_path)
