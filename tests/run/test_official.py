"""Weights of the official models become a model file that scores as the weights say."""

import dataclasses
import re

from flax import traverse_util
import numpy as np
import pytest

from tests.support import commands, parts, saved_models
from tests.support.run_folders import write_fold
import tpugraphs_jax
from tpugraphs_jax import metrics, submission
from tpugraphs_jax.columns import OPCODES
from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import SPLITS
from tpugraphs_jax.rankers import official_weights
from tpugraphs_jax.run import official
from tpugraphs_jax.train import results
from tpugraphs_jax.train.loading import evaluable

VARIANTS = {"tile": "LateJoinSAGE,ci", "layout": "xla-random,official,ci"}
TILE_MODELS = ("EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN", "MLP")
COLLECTIONS = {"tile": "tile:xla", "layout": "layout:xla:random"}


def weights_of(kind, data_root, variant="", **fields):
  """Random weights as the official code has them, and an experiment whose table has all opcodes."""
  experiment = parts.make(kind, variant or VARIANTS[kind], data_root=str(data_root), **fields)
  graphs = evaluable(experiment.data.load("train"))
  experiment.fit_transforms(graphs)
  shapes = traverse_util.flatten_dict(experiment.ranker.param_shapes(graphs[0]))
  rng = np.random.default_rng(0)
  weights = [
    rng.normal(0, 0.3, shapes[path].shape).astype(np.float32)
    for path in official_weights.weight_order(experiment.ranker.family.network)
  ]
  largest = 0
  for split in SPLITS:
    for path in npz.split_files(data_root, COLLECTIONS[kind], split):
      with np.load(path) as file:
        largest = max(largest, file["node_opcode"].max())
  weights[0] = weights[0][: largest + 1]
  return experiment, weights


def with_all_opcodes(weights):
  """The same with a table for all opcodes, with zeros for those that the data lacks."""
  return [np.pad(weights[0], [(0, OPCODES - len(weights[0])), (0, 0)]), *weights[1:]]


def command(kind, data_root, weights, out, *changes, variant=""):
  """Makes a model from weights."""
  config = f"--config={kind}.py:{variant or VARIANTS[kind]}"
  flags = config, f"--data_root={data_root}", f"--out={out}"
  return official.main([*flags, f"--weights={weights}", *(f"--set={change}" for change in changes)])


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_model_scores_as_its_weights_say(kind, data_root, tmp_path):
  experiment, weights = weights_of(kind, data_root)
  np.savez(tmp_path / "weights.npz", *weights)  # twelve and more: arr_10 comes after arr_9
  assert command(kind, data_root, tmp_path / "weights.npz", tmp_path / "out") == 0
  assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.npz"]
  path = npz.split_files(data_root, COLLECTIONS[kind], "test")[0]
  graph = (npz.read_tile if kind == "tile" else npz.read_layout)(path)
  assert len(weights[0]) < OPCODES
  experiment.ranker.params = official_weights.params_from_official(
    experiment.ranker.family.network, with_all_opcodes(weights)
  )
  (expected,) = experiment.ranker.scores([graph])
  _, found = tpugraphs_jax.rank(tmp_path / "out", graph)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert np.ptp(found) > 0


@pytest.mark.parametrize("name", TILE_MODELS)
def test_a_saved_model_of_tensorflow_scores_as_its_arrays_say(name, data_root, tmp_path, capsys):
  variant = f"{name},ci"
  experiment, weights = weights_of("tile", data_root, variant)
  folder = saved_models.write(tmp_path / "model_0a", weights)
  assert command("tile", data_root, folder, tmp_path / "out", variant=variant) == 0
  assert "minima and maxima of features: over 3 training graphs in" in capsys.readouterr().out
  experiment.ranker.params = official_weights.params_from_official(
    experiment.ranker.family.network, with_all_opcodes(weights)
  )
  graphs = [npz.read_tile(path) for path in npz.split_files(data_root, "tile:xla", "test")]
  ranker = tpugraphs_jax.load(tmp_path / "out")
  assert ranker.family.network.opcodes == len(weights[0]) < OPCODES
  for found, expected in zip(ranker.scores(graphs), experiment.ranker.scores(graphs), strict=True):
    np.testing.assert_array_equal(found, expected)
    assert np.ptp(found) > 0


def test_the_ranges_of_features_are_not_guessed(data_root, tmp_path, capsys):
  """Without the training split, and with one whose columns are others."""
  _, weights = weights_of("tile", data_root)
  folder = saved_models.write(tmp_path / "model_0a", weights)
  other = tmp_path / "npz" / "tile" / "xla"
  assert command("tile", tmp_path / "npz", folder, tmp_path / "out") == 2
  assert "is not a folder" in capsys.readouterr().err
  (other / "train").mkdir(parents=True)
  assert command("tile", tmp_path / "npz", folder, tmp_path / "out") == 2
  assert "tile/xla" in capsys.readouterr().err
  graph = npz.read_tile(npz.split_files(data_root, "tile:xla", "train")[0])
  npz.write_tile(other / "train" / "a.npz", graph)
  assert command("tile", tmp_path / "npz", folder, tmp_path / "out") == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
  assert "the training split of the weights" in line
  assert not (tmp_path / "out").exists()


def test_opcodes_without_an_embedding_are_refused_by_number(data_root, tmp_path, capsys):
  _, weights = weights_of("tile", data_root)
  rows = len(weights[0])
  np.savez(tmp_path / "weights.npz", weights[0][:5], *weights[1:])
  assert command("tile", data_root, tmp_path / "weights.npz", tmp_path / "few") == 2
  assert re.search(
    r"has opcode \d+, and the model has embeddings of the opcodes 0 to 4", capsys.readouterr().err
  )
  np.savez(tmp_path / "weights.npz", *weights)
  assert command("tile", data_root, tmp_path / "weights.npz", tmp_path / "out") == 0
  graph = npz.read_tile(npz.split_files(data_root, "tile:xla", "test")[0])
  opcode = graph.node_opcode.copy()
  opcode[0] = rows
  changed = dataclasses.replace(graph, node_opcode=opcode)
  with pytest.raises(ValueError, match=f"{graph.name} has opcode {rows}, .* 0 to {rows - 1}"):
    tpugraphs_jax.rank(tmp_path / "out", changed)


def test_fields_of_the_config_can_be_changed(data_root, tmp_path, capsys):
  _, weights = weights_of("tile", data_root)
  np.savez(tmp_path / "weights.npz", *weights)
  run = lambda change: command(
    "tile", data_root, tmp_path / "weights.npz", tmp_path / "out", change
  )
  assert run("model.hidden_dim=9") == 2
  assert "give the config (widths" in capsys.readouterr().err
  for change, complaint in (
    ("model.hiden_dim=9", "did you mean model.hidden_dim?"),
    ("model.hidden_dim", "expected a field"),
    ("model.hidden_dim=a", "expected a whole number"),
  ):
    assert run(change) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --set={change}: ") and complaint in line
  assert run("loss.losses=MSE:1") == 0
  assert tpugraphs_jax.load(tmp_path / "out").config.loss.losses == "MSE:1"


@pytest.mark.parametrize(
  "damage, complaint",
  [
    (lambda weights: weights[:-1], r"\d+ weights given, TileSAGE has \d+"),
    (lambda weights: [weights[0], weights[1].T, *weights[2:]], "give the config .widths"),
  ],
)
def test_weights_of_another_model_are_refused_in_one_line(
  damage, complaint, data_root, tmp_path, capsys
):
  _, weights = weights_of("tile", data_root)
  np.savez(tmp_path / "weights.npz", *damage(weights))
  assert command("tile", data_root, tmp_path / "weights.npz", tmp_path / "out") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and "weights" in line
  assert re.search(complaint, line)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  "content, complaint",
  [
    (None, "is missing: --weights must name a SavedModel"),
    (b"PK\x03\x04 no archive", "not a complete .npz archive"),
  ],
)
def test_a_file_without_weights_is_refused(content, complaint, data_root, tmp_path, capsys):
  path = tmp_path / "weights.npz"
  if content is not None:
    path.write_bytes(content)
  assert command("tile", data_root, path, tmp_path / "out") == 2
  assert complaint in capsys.readouterr().err


def test_names_are_ordered_by_their_numbers(tmp_path):
  path = tmp_path / "weights.npz"
  np.savez(path, **{f"arr_{i}": np.full(1, i) for i in (10, 2, 0, 1, 11)})
  assert [int(array[0]) for array in official.read_weights(path)] == [0, 1, 2, 10, 11]
  np.savez(path, **{f"w{i:02d}:dense_{9 - i}/kernel": np.full(1, i) for i in range(3)})
  assert [int(array[0]) for array in official.read_weights(path)] == [0, 1, 2]


def test_the_ensemble_command_ranks_and_judges_with_both(data_root, tmp_path):
  """`--do=... --ensemble=DIR,DIR` ranks by the average of both and judges it."""
  _, weights = weights_of("tile", data_root)
  rng = np.random.default_rng(1)
  for name in ("a", "b"):
    changed = [w + rng.normal(0, 0.1, w.shape).astype(np.float32) for w in weights]
    np.savez(tmp_path / f"{name}.npz", *changed)
    assert command("tile", data_root, tmp_path / f"{name}.npz", tmp_path / name) == 0
  home = tmp_path / "home"
  home.mkdir()
  folders = f"--ensemble={tmp_path / 'a'},{tmp_path / 'b'}"
  run = lambda *flags: commands.Run(
    ["run_tile.py", folders, f"--data_root={data_root}", f"--workdir={tmp_path / 'out'}", *flags]
  )
  (tmp_path / "run/checkpoints").mkdir(parents=True)
  runs = [
    run("--do=predict", "--combine=rank"),
    run("--do=evaluate", "--combine=rank"),
    run(),
    commands.Run(["run_tile.py", folders, "--do=predict", "--synthetic", "--workdir=new"]),
    run("--do=evaluate", f"--workdir={tmp_path / 'run'}"),
  ]
  good, judged, bad, made_up, used = commands.run_all(runs, home=home)
  assert (good.code, judged.code) == (0, 0), good.err + judged.err
  assert made_up.complaint.endswith("leave out --synthetic")
  assert used.complaint.endswith("the ensemble would replace its results: give another --workdir")
  assert bad.code == 2 and "--ensemble goes with --do=evaluate or predict" in bad.complaint
  ranked = submission.read_results(tmp_path / "out" / "results.csv")
  ensemble = tpugraphs_jax.Ensemble([tmp_path / "a", tmp_path / "b"], combine="rank")
  for path in npz.split_files(data_root, "tile:xla", "test"):
    graph = npz.read_tile(path)
    (scores,) = ensemble.scores([graph])
    found = ranked[f"tile:xla:{graph.name}"]
    assert (np.diff(scores[found]) > -1.01).all()  # rounding may swap ranks next to each other
  taus = []
  for path in npz.split_files(data_root, "tile:xla", "valid"):
    graph = npz.read_tile(path)
    taus.append(metrics.kendall_tau(ensemble.scores([graph])[0], graph.configs.labels))
  found = results.read_summary(tmp_path / "out")
  assert found["model"] == "ensemble of 2" and found["collection"] == "tile:xla"
  assert found["validation"]["metrics"]["kendaltau_mean"] == pytest.approx(np.mean(taus), abs=0.02)
  assert any(line.startswith("tile:xla: ") for line in judged.told)


def test_the_command_on_the_page_of_folds_ranks_with_their_models(data_root, tmp_path, monkeypatch):
  for fold in range(3):
    folder, fields = tmp_path / f"out/fold_{fold}/seed_0", {"data.folds": 3, "data.fold": fold}
    write_fold(folder, fold, (1, -1, 1))
    np.savez(tmp_path / "weights.npz", *weights_of("tile", data_root, **fields)[1])
    changes = [f"{name}={value}" for name, value in fields.items()]
    assert command("tile", data_root, tmp_path / "weights.npz", folder, *changes) == 0
  for path in (tmp_path / "out").glob("*/*/config.json"):
    path.unlink()  # of a made-up run; the model file has the config of the model
  arguments = ["run_tile.py", "--do=predict", "--combine=rank"]
  arguments += ["--config.data.folds=0", "--config.data.fold=0"]
  arguments += ["--ensemble=" + ",".join(sorted(map(str, (tmp_path / "out").glob("*/*"))))]
  arguments += [f"--workdir={tmp_path}/out/together", f"--data_root={data_root}"]
  (ranked,) = commands.run_all([commands.Run(arguments)], home=tmp_path)
  assert ranked.code == 0, ranked.err
  found = submission.read_results(tmp_path / "out" / "together" / "results.csv")
  paths = npz.split_files(data_root, "tile:xla", "test")
  assert set(found) == {f"tile:xla:{path.stem}" for path in paths}
