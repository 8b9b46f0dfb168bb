"""Options of data, loss, sampling and training work together, for every kind of ranker."""

import csv
import json
import shutil

import numpy as np
import pytest

from tests.support import commands, parts
import tpugraphs_jax
from tpugraphs_jax import submission, synthetic
from tpugraphs_jax.data import folds, npz
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.report import runs
from tpugraphs_jax.train import training

COLLECTIONS = {"layout": "layout:xla:random", "tile": "tile:xla"}
SMALL = parts.TINY | {"train.epochs": 2, "batch.slates_per_epoch": 16, "train.log_every_steps": 1}
SMALL |= {"model.hidden_dim": 8, "model.op_embed_dim": 4}
TOGETHER = {
  "optimizer.average_window": (0.5, 1.0),
  "loss.score_norm_clip": 50.0,
  "batch.sampling": "uniform_replacement",
}
CASES = {
  "layout": (
    "xla-random,full,ci",
    {
      "batch.configs": 8,
      "data.graph_reduction": "config_neighborhood",
      "data.virtual_node": "output",
      "data.features": ("released", "operand_shapes", "tile_modulo"),
      "data.feature_transform": "operand_shapes=log_offset(3),tile_modulo=varying,*=minmax",
      "batch.graph_sampling": "sqrt",
      "loss.losses": "PairwiseHingeLoss:0.5,CrossHingeLoss:0.5",
      "loss.pair_reduction": "mean_valid",
    },
  ),
  "tables": (
    "xla-random,tables,ci",
    {
      "batch.configs": 64,
      "data.graph_reduction": "config_neighborhood",
      "data.virtual_node": "cluster",
      "data.cluster_nodes": 20,
      "loss.margin": 0.02,
      "loss.losses": "DiffMatLoss:1,CrossHingeLoss:1,ListMLELoss:1",
    },
  ),
  "tile": (
    "ci",
    {
      "batch.configs": 6,
      "data.virtual_node": "cluster",
      "data.cluster_nodes": 5,
      "batch.graph_sampling": "sqrt",
      "loss.temperature": 1.0,
      "loss.losses": "DiffMatLoss:1,MAPE:1",
      "optimizer.learning_rate": 0.01,
    },
  ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return synthetic.generate(
    tmp_path_factory.mktemp("data"), collections=COLLECTIONS.values(), limit=6, progress=False
  )


@pytest.mark.parametrize("name", CASES)
def test_options_together_train_rank_and_are_saved(name, root, tmp_path):
  kind = "tile" if name == "tile" else "layout"
  variant, changes = CASES[name]
  config = parts.config_of(kind, variant, data_root=str(root), **(SMALL | TOGETHER | changes))
  training.run(config, tmp_path)
  with (tmp_path / "validation.csv").open() as file:
    rows = list(csv.DictReader(file))
  assert rows and all(np.isfinite(float(row["opa"])) for row in rows)
  read = npz.read_tile if kind == "tile" else npz.read_layout
  graph = read(npz.split_files(root, COLLECTIONS[kind], "test")[0])
  order, scores = tpugraphs_jax.rank(tmp_path / "model.npz", graph)
  assert np.isfinite(scores).all() and np.ptp(scores) > 0
  np.testing.assert_array_equal(order, np.argsort(scores, kind="stable"))
  added = tpugraphs_jax.load(tmp_path).prepare(graph).opcode
  assert len(added) != graph.num_nodes and added[-1] == 0  # the last node is virtual
  if kind == "tile":
    with (tmp_path / "validation_programs.csv").open() as file:
      assert all(float(row["mape"]) > 0 for row in csv.DictReader(file))


def test_a_run_on_folds_is_judged_on_its_test_fold(root, tmp_path):
  fields = {"data.folds": 3, "data.fold": 1, "model.hidden_dim": 4, "train.epochs": 1}
  config = parts.config_of("tile", "ci", data_root=str(root), **(SMALL | fields))
  training.run(config, tmp_path)
  division, fold = folds.read(tmp_path / folds.FILE)
  assert (division, fold) == (folds.divide(root, ["tile:xla"], 3), 1)
  found = json.loads((tmp_path / "summary.json").read_text())
  for split, name in (("test", "test"), ("valid", "validation")):
    files = division.files(root, Collection("tile:xla"), 1, split)
    with (tmp_path / f"{name}.csv").open() as file:
      assert sorted(row["graph"] for row in csv.DictReader(file)) == [path.stem for path in files]
    assert (found[name]["split"], found[name]["graphs"]) == (split, len(files))
  tested = [path.stem for path in division.files(root, Collection("tile:xla"), 1, "test")]
  (value, graphs, *_) = submission.score(tmp_path / "results.csv", root, split="test")["tile:xla"]
  assert graphs == len(tested)
  assert value == pytest.approx(1 - found["test"]["metrics"]["slowdown5_mean"])
  run = runs.read(tmp_path)
  assert (sorted(graph.name for graph in run.judged), run.fold) == (sorted(tested), 1)
  assert all(run.file_of(name).exists() for name in tested)
  # A new file changes the folds: what was trained on would be tested.
  kept = (tmp_path / folds.FILE).read_text()
  (tmp_path / folds.FILE).write_text(kept.replace(f'/{tested[0]}": 1', f'/{tested[0]}": 2'))
  with pytest.raises(ValueError, match="other folds"):
    training.run(config, tmp_path, do=("evaluate",))


@pytest.mark.parametrize(
  "link", ["metrics.jsonl", "checkpoints", "tensorboard/events", "also/tile_xla/results.csv"]
)
def test_a_run_refuses_a_folder_with_links_before_it_writes(tmp_path, link):
  (tmp_path / "precious").write_text("kept")
  path = tmp_path / "sent" / link
  path.parent.mkdir(parents=True)
  path.symlink_to(tmp_path / "precious")
  before = sorted((tmp_path / "sent").rglob("*"))
  for do in (["train"], ["evaluate"], ["predict"]):
    with pytest.raises(ValueError, match="a link to"):
      training.run(tpugraphs_jax.load_config("tile.py:ci"), tmp_path / "sent", do=do, resume=True)
  assert sorted((tmp_path / "sent").rglob("*")) == before
  assert (tmp_path / "precious").read_text() == "kept"


_OWN_LOSS = """
from tpugraphs_jax.losses import LOSSES, mse

@LOSSES.register("OwnLoss")
def own_loss(scores, labels, *, where=None):
  return mse(scores, labels, where=where)
"""


def test_a_model_is_judged_without_the_module_of_its_loss(tmp_path):
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "own_loss.py").write_text(_OWN_LOSS)
  script = shutil.copy(commands.ROOT / "run_tile.py", tmp_path / "own")  # finds modules beside it

  def run(*flags, script=commands.ROOT / "run_tile.py"):
    command = [script, f"--workdir={tmp_path / 'run'}", "--noreport", *flags]
    return commands.run(commands.Run(command), home=tmp_path)

  extension = "--config.extensions=('own_loss',)"
  options = "--config=tile.py:ci", "--synthetic", "--config.train.epochs=1"
  trained = run(extension, "--config.loss.losses=OwnLoss:1", *options, script=script)
  assert not trained.code, trained.err
  path = tmp_path / "run" / "validation.csv"
  expected, data = path.read_text(), f"--data_root={tmp_path / 'run/synthetic/npz'}"
  path.unlink()
  judged = run("--do=evaluate", data)
  assert not judged.code, judged.err
  assert path.read_text() == expected
  resumed = run("--resume", data)
  assert resumed.code and "needs the module 'own_loss'" in resumed.err
