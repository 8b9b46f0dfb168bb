"""Weights of the official models become a model file that scores as the weights say."""

import re

import commands
from flax import traverse_util
import numpy as np
import parts
import pytest

import tpugraphs_jax
from tpugraphs_jax import metrics, submission
from tpugraphs_jax.data import npz, synthetic
from tpugraphs_jax.rankers import official_weights as official_models
from tpugraphs_jax.run import official, results
from tpugraphs_jax.run.job import judged

VARIANTS = {"tile": "LateJoinSAGE,ci", "layout": "xla-random,official,ci"}
COLLECTIONS = {"tile": "tile:xla", "layout": "layout:xla:random"}


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
  return synthetic.generate(
      tmp_path_factory.mktemp("data"), collections=COLLECTIONS.values(), limit=3, progress=False)


def weights_of(kind, data_root):
  """Random weights in the order of Keras, and the job whose model they belong to."""
  job = parts.make(kind, VARIANTS[kind])
  graphs = judged(job.data.load(data_root, "train"))
  job.fit(graphs)
  shapes = traverse_util.flatten_dict(job.ranker.param_shapes(graphs[0]))
  rng = np.random.default_rng(0)
  weights = [rng.normal(0, 0.3, shapes[path].shape).astype(np.float32)
             for path in official_models.weight_order(job.ranker.family.network)]
  return job, weights


def command(kind, data_root, weights, out):
  return official.main([f"--config={kind}.py:{VARIANTS[kind]}", f"--weights={weights}",
                        f"--data_root={data_root}", f"--out={out}"])


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_model_scores_as_its_weights_say(kind, data_root, tmp_path):
  job, weights = weights_of(kind, data_root)
  np.savez(tmp_path / "weights.npz", *weights)  # twelve and more: arr_10 comes after arr_9
  assert command(kind, data_root, tmp_path / "weights.npz", tmp_path / "out") == 0
  assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.npz"]
  path = npz.split_files(data_root, COLLECTIONS[kind], "test")[0]
  graph = (npz.read_tile if kind == "tile" else npz.read_layout)(path)
  job.ranker.params = official_models.params_from_official(job.ranker.family.network, weights)
  (expected,) = job.ranker.scores([graph])
  _, found = tpugraphs_jax.rank(tmp_path / "out", graph)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert np.ptp(found) > 0


@pytest.mark.parametrize("damage, complaint", [
    (lambda weights: weights[:-1], r"\d+ weights given, SAGE has \d+"),
    (lambda weights: [weights[0], weights[1].T, *weights[2:]], "give the config .widths"),
])
def test_weights_of_another_model_are_refused_in_one_line(
    damage, complaint, data_root, tmp_path, capsys):
  _, weights = weights_of("tile", data_root)
  np.savez(tmp_path / "weights.npz", *damage(weights))
  assert command("tile", data_root, tmp_path / "weights.npz", tmp_path / "out") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and "weights" in line
  assert re.search(complaint, line)
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content, complaint", [
    (None, "is missing: --weights must name"),
    (b"PK\x03\x04 no archive", "not a complete .npz archive"),
])
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
  """`--mode=... --ensemble=DIR,DIR` ranks by the average of both and judges it."""
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
      ["run_tile.py", folders, f"--data_root={data_root}", f"--workdir={tmp_path / 'out'}", *flags])
  (tmp_path / "run/checkpoints").mkdir(parents=True)
  good, judged, bad, made_up, used = commands.run_all([
      run("--mode=predict", "--combine=rank"), run("--mode=evaluate", "--combine=rank"), run(),
      commands.Run(["run_tile.py", folders, "--mode=predict", "--synthetic", "--workdir=new"]),
      run("--mode=evaluate", f"--workdir={tmp_path / 'run'}")], home=home)
  assert (good.code, judged.code) == (0, 0), good.err + judged.err
  assert made_up.complaint.endswith("leave out --synthetic")
  assert used.complaint.endswith("of the ensemble would replace: give another --workdir")
  assert bad.code == 2 and "--ensemble goes with --mode=evaluate or predict" in bad.complaint
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
    taus.append(metrics.kendall_tau(ensemble.scores([graph])[0], graph.configs.runtime_ns))
  found = results.read_summary(tmp_path / "out")
  assert found["model"] == "ensemble of 2" and found["collection"] == "tile:xla"
  assert found["validation"]["metrics"]["kendaltau_mean"] == pytest.approx(np.mean(taus), abs=0.02)
  assert any(line.startswith("tile:xla: ") for line in judged.told)
