"""What an experiment reads, leaves out, fits, judges and ranks; no model is compiled here."""

import contextlib
import csv
import dataclasses
import json
import types

import numpy as np
import pytest

from tests.support import families, parts, random_graphs
from tpugraphs_jax import metrics, submission
from tpugraphs_jax.columns import NODE_FEATURES, TILE_CONFIG_FEATURES
from tpugraphs_jax.data import npz, transforms
from tpugraphs_jax.infra import files
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.train import evaluation, results, training
from tpugraphs_jax.train.loading import evaluable, forget_folds, keep_folds, trainable, with_folders

COLLECTIONS = {"tile": "tile:xla", "layout": "layout:xla:random"}
KINDS = tuple(COLLECTIONS)


def graph_of(kind, name, runtime_ns, *, same=False, seed=0):
  """A graph with full-width features and the given runtimes."""
  rng, count = np.random.default_rng([seed, len(name)]), len(runtime_ns)
  if kind == "tile":
    graph = random_graphs.tile_graph(rng, nodes=7, edges=9, configs=count, name=name)
    feat = rng.integers(0, 9, (1 if same else count, TILE_CONFIG_FEATURES)).astype(np.float32)
    feat = np.broadcast_to(feat, (count, TILE_CONFIG_FEATURES))
    choices = {"config_feat": feat, "normalizer_ns": np.full(count, 100)}
  else:
    graph = random_graphs.layout_graph(
      rng, nodes=7, edges=9, config_nodes=[5, 1, 2], configs=count, name=name
    )
    numbers = np.full(count, 3) if same else np.arange(count)
    rows = np.stack([numbers % 6, numbers // 6 % 6, numbers // 36], axis=1).astype(np.uint8)
    choices = {"node_group": np.arange(3, dtype=np.int32), "group_row": rows}
  choices["runtime_ns" if kind == "tile" else "labels"] = np.array(runtime_ns, np.int64)
  configs = dataclasses.replace(graph.configs, **choices)
  feat = rng.integers(0, 9, (7, NODE_FEATURES)).astype(np.float32)
  return dataclasses.replace(graph, node_feat=feat, configs=configs)


def fitted(kind, graphs, **changes):
  experiment = parts.make(kind, **changes)
  experiment.fit_transforms(graphs)
  return experiment


def written(root, kind, **splits):
  """A folder of data with these graphs."""
  for split, graphs in splits.items():
    folder = root.joinpath(*COLLECTIONS[kind].split(":"), split)
    folder.mkdir(parents=True)
    for graph in graphs:
      (npz.write_tile if kind == "tile" else npz.write_layout)(folder / f"{graph.name}.npz", graph)
  return str(root)


def messages(caplog):
  return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_layout_graphs_that_teach_nothing_are_left_out_by_name(caplog):
  experiment = parts.make("layout", **{"batch.min_configs": 3})
  good = graph_of("layout", "good", [3, 1, 2])
  graphs = [
    graph_of("layout", "few", [1, 2]),
    good,
    graph_of("layout", "same_a", [1, 2, 3], same=True),
    graph_of("layout", "flat", [2**40] * 3),
    graph_of("layout", "test", [0, 0, 0]),
    *(graph_of("layout", f"same_{i}", [3, 2, 1], same=True) for i in range(9)),
  ]
  assert trainable(experiment.data, graphs, min_configs=3) == [good]
  names = ", ".join(["same_a", *(f"same_{i}" for i in range(9))])
  assert messages(caplog) == [
    "skipped 1 of 14 graphs for training: fewer than 3 configurations: few",
    f"skipped 10 of 14 graphs for training: all configurations equal: {names}",
    "skipped 1 of 14 graphs for training: all runtimes equal: flat",
    "skipped 1 of 14 graphs for training: no runtimes: test",
  ]


def validation_of(configs, *steps, **changes):
  """Kernels that training judges, of kernels with so many configurations, and the ids by step."""
  experiment = parts.make("tile", "EarlyJoinSAGE", **changes)
  graphs = [
    graph_of("tile", f"g_{number}", np.arange(count) + 5) for number, count in enumerate(configs)
  ]
  experiment.fit_transforms(graphs)
  sample = training.sample_graphs(experiment.config, experiment.prepare(graphs))
  return sample, [training.sample_ids(experiment.config, sample, step) for step in steps]


def test_a_fixed_validation_sample_is_the_same_after_every_step():
  graphs, (ids, later) = validation_of([3, 400, 2], 7, 8, **{"train.valid_sampling": "fixed"})
  assert [graph.name for graph in graphs] == ["g_0", "g_1", "g_2"]
  assert [len(numbers) for numbers in ids] == [3, 256, 2]
  np.testing.assert_equal(ids, later)


@pytest.mark.parametrize(
  "configs, drop, names",
  [
    ([30, 9, 10, 40], False, [0, 2, 3]),
    ([30, 9, 10, 40], True, [0, 2]),
    ([30, 9, 10], True, [0, 2]),
    ([30, 9], True, [0]),
  ],
)
def test_validation_slates_are_drawn_anew_of_graphs_that_suffice(configs, drop, names):
  changes = {"batch.graphs": 2, "batch.drop_remainder": drop}
  graphs, (ids, later) = validation_of(configs, 7, 8, **changes)
  assert [graph.name for graph in graphs] == [f"g_{number}" for number in names]
  for first, second, number in zip(ids, later, names):
    assert len(set(first)) == len(set(second)) == 10 and max(first) < configs[number]
    assert configs[number] == 10 or set(first) != set(second)
  np.testing.assert_equal(validation_of(configs, 8, **changes)[1], [later])  # after a resume


def test_validation_slates_need_a_graph_with_enough_configurations():
  with pytest.raises(ValueError, match="batch.min_configs=10 .* train.valid_sampling to fixed"):
    validation_of([9, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_train_on_is_an_error(kind):
  with pytest.raises(ValueError, match="none"):
    experiment = parts.make(kind)
    trainable(experiment.data, [graph_of(kind, "unlabelled", [0] * 8)], min_configs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_unlabelled_graphs_are_ranked_not_scored(kind, caplog):
  good, flat = graph_of(kind, "good", [3, 1]), graph_of(kind, "flat", [2, 2])
  graphs = [good, graph_of(kind, "one", [4]), graph_of(kind, "unlabelled", [0, 0]), flat]
  assert evaluable(graphs) == [good, flat]
  assert messages(caplog) == [
    "skipped 1 of 4 graphs for evaluation: fewer than 2 configurations: one",
    "skipped 1 of 4 graphs for evaluation: no runtimes (ranked, not scored): unlabelled",
  ]


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_come_from_training_alone_and_from_the_file_later(kind, tmp_path):
  train = [graph_of(kind, f"train{i}", [1, 2, 3], seed=i) for i in range(3)]
  ranker, path = fitted(kind, train).ranker, tmp_path / "features.json"
  transforms.save(path, ranker.transforms)
  later = parts.make(kind).ranker
  later.use_transforms(transforms.load(path), where=path)
  other = graph_of(kind, "other", [5, 4, 3, 2], seed=9)
  expected, found = ranker.prepare(other), later.prepare(other)
  np.testing.assert_array_equal(found.feat, expected.feat)
  refitted = fitted(kind, [other]).ranker.prepare(other)
  assert refitted.feat.shape != expected.feat.shape or (refitted.feat != expected.feat).any()


def made_up(family, made):
  """Gives a family the scores `made`, by graph name; returns its `Family.scores`."""

  def run(params, graphs, config_ids, *, progress=False):
    return [np.asarray(made[g.name], np.float32)[ids] for g, ids in zip(graphs, config_ids)]

  return families.scorer_of(family, run)


@pytest.mark.parametrize("kind, ks", [("tile", (1, 5, 10)), ("layout", (1, 10, 100))])
def test_rows_hold_exact_metrics_and_opa_is_pooled_over_pairs(kind, ks):
  rng = np.random.default_rng(3)
  runtimes = {"a": rng.permutation(30) + 2**40, "b": rng.integers(1, 4, 12), "c": np.full(5, 7)}
  scores = {name: rng.normal(size=len(r)) for name, r in runtimes.items()}
  graphs = [graph_of(kind, name, runtime) for name, runtime in runtimes.items()]
  ranker = fitted(kind, graphs).ranker
  chosen = [np.array([3, 29, 1, 7]), np.arange(12), np.arange(5)]
  prepared = [ranker.prepare(graph) for graph in graphs]
  found = made_up(ranker.family, scores)(None, prepared, chosen)
  rows, means = evaluation.evaluate(evaluation.with_labels(prepared, chosen, found), ks)
  concordant = pairs = 0
  for row, (name, runtime), ids in zip(rows, runtimes.items(), chosen):
    s, r = scores[name].astype(np.float32)[ids], runtime[ids]
    r = r / 100 if kind == "tile" else r  # the normalizer of all configurations
    assert (row["graph"], row["nodes"], row["configs"]) == (name, 7, len(ids))
    np.testing.assert_equal(row["opa"], metrics.opa(s, r))
    np.testing.assert_equal(row["kendaltau"], metrics.kendall_tau(s, r))
    best = {k: r[np.argsort(s, kind="stable")[:k]].min() for k in ks}
    assert all(row[f"slowdown{k}"] == (best[k] - r.min()) / r.min() for k in ks)
    slower = r[:, None] > r[None]
    concordant += int((slower & (s[:, None] > s[None])).sum())
    pairs += int(slower.sum())
  assert means["opa"] == concordant / pairs
  assert means["kendaltau"] == np.mean([rows[0]["kendaltau"], rows[1]["kendaltau"]])
  assert means["slowdown1"] == np.mean([row["slowdown1"] for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_ties_are_ranked_in_file_order(kind, tmp_path):
  graphs = [graph_of(kind, "same", [0] * 40, same=True), graph_of(kind, "some", [0] * 6)]
  experiment = fitted(kind, graphs)
  # Equal configurations are scored once, so that their made-up scores do not matter.
  made_up(experiment.ranker.family, {"same": np.arange(40)[::-1], "some": [2, 1, 2, 1, 0, 2]})
  np.testing.assert_array_equal(experiment.ranker.rank(graphs[0])[0], np.arange(40))
  root = written(tmp_path / "npz", kind, test=graphs)
  results.predict(dataclasses.replace(experiment.data, root=root), experiment.ranker, tmp_path)
  saved, name = submission.read_results(tmp_path / "results.csv"), experiment.ranker.collection.name
  np.testing.assert_array_equal(saved[f"{name}:same"], np.arange(40))
  np.testing.assert_array_equal(saved[f"{name}:some"], [4, 1, 3, 0, 2, 5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("same", ["runtimes", "features"])
def test_validation_graphs_without_an_order_choose_no_checkpoint(kind, same, tmp_path):
  train = [graph_of(kind, f"t{number}", np.arange(1, 31)) for number in range(3)]
  runtime = [7] * 30 if same == "runtimes" else np.arange(1, 31)
  valid = graph_of(kind, "v", runtime, same=same == "features")
  root = written(tmp_path / "npz", kind, train=train, valid=[valid])
  experiment = parts.make(kind, data_root=str(root))
  with pytest.raises(ValueError, match="no labelled validation graph"):
    experiment.load_graphs(tmp_path)


def validation_ids(**changes):
  graph = graph_of("layout", "unet", np.arange(1, 10))
  return parts.make("layout", **changes).data.validation_ids(graph.name, graph.configs)


def test_layout_validation_takes_published_indices_else_a_seeded_sample(tmp_path):
  (tmp_path / "xla_random.json").write_text(json.dumps({"unet": [7, 0, 7]}))
  np.testing.assert_array_equal(validation_ids(**{"eval.indices_dir": str(tmp_path)}), [7, 0, 7])
  sampled, again = (validation_ids(**{"eval.max_configs": 4}) for _ in range(2))
  np.testing.assert_array_equal(sampled, again)
  assert len(set(sampled.tolist())) == 4 and (np.diff(sampled) > 0).all()
  for limit in (0, 9, 10):
    np.testing.assert_array_equal(validation_ids(**{"eval.max_configs": limit}), np.arange(9))


@pytest.mark.parametrize("is_predicted", [False, True])
def test_programs_have_the_figures_of_the_mlsys_2021_tables(is_predicted):
  rng = np.random.default_rng(5)
  names = ["net_a_1", "net_a_2", "net_b_7", "net_a_3"]
  runtimes = [rng.integers(1000, 9000, size) for size in (3, 6, 6, 6)]
  runtimes[3][:] = 700  # no order, so no tau, but a MAPE
  scores = [rng.uniform(0.5, 2, len(runtime)).astype(np.float32) for runtime in runtimes]
  predicted = [2000 * found for found in scores] if is_predicted else None
  judged = [
    evaluation.GraphScores(name, 7, np.arange(len(runtime)), found, runtime / 500)
    for name, runtime, found in zip(names, runtimes, scores)
  ]
  rows = evaluation.program_rows(judged, runtimes, predicted)
  assert [(row["program"], row["kernels"]) for row in rows] == [("net_a", 3), ("net_b", 1)]
  for row, members in zip(rows, ([0, 1, 3], [2])):
    taus, lost, best, errors = [], 0, 0, []
    for i in members:
      runtime, s = runtimes[i], scores[i]
      taus += [metrics.kendall_tau(s, runtime)] if np.ptp(runtime) else []
      lost += int(runtime[np.argmin(s)] - runtime.min())
      best += int(runtime.min())
      errors += [abs(2000 * value - true) / true for value, true in zip(s, runtime.tolist())]
    np.testing.assert_allclose(row["kendaltau"], np.mean(taus))
    np.testing.assert_allclose(row["tile_size_ape"], 100 * lost / best)
    assert ("mape" in row) == is_predicted
    if is_predicted:
      np.testing.assert_allclose(row["mape"], 100 * np.mean(errors), rtol=1e-6)


@pytest.mark.parametrize("loss, predict", [("LogMSE:1", np.exp), ("MSE:1", np.asarray)])
def test_scores_of_regression_losses_predict_runtimes_in_the_unit_of_the_target(
  loss, predict, tmp_path
):
  graph, scores = graph_of("tile", "net_1", [150, 320, 210]), [0.5, 1.5, 0.75]
  root = written(tmp_path / "npz", "tile", valid=[graph])
  fields = {"loss.losses": loss, "batch.target": "official"}
  experiment = fitted("tile", [graph], data_root=root, **fields)
  made_up(experiment.ranker.family, {"net_1": scores})
  results.evaluate(experiment.ranker, experiment.data, tmp_path)
  with (tmp_path / "validation_programs.csv").open() as file:
    (row,) = csv.DictReader(file)
  error = abs(100 * predict(scores) / graph.configs.runtime_ns - 1)  # the unit is 100 ns
  assert float(row["mape"]) == pytest.approx(100 * error.mean(), rel=1e-5)


def test_duplicates_are_joined_in_training_alone_and_thirds_are_kept(tmp_path):
  graph = graph_of("layout", "g", np.arange(60, 0, -1))
  graph.configs.group_row[1::2] = graph.configs.group_row[0]
  root = written(tmp_path / "npz", "layout", train=[graph], valid=[graph])
  distinct = len(np.unique(graph.configs.decode(np.arange(60)), axis=0))
  assert distinct == 30
  assert len(parts.make("layout", data_root=root).data.load("train")[0].configs) == distinct
  assert len(parts.make("layout", data_root=root).data.load("valid")[0].configs) == 60
  keep = {"data.duplicate_policy": "keep"}
  assert len(parts.make("layout", data_root=root, **keep).data.load("train")[0].configs) == 60
  (limited,) = parts.make("layout", data_root=root, **keep, **{"data.max_configs": 9}).data.load(
    "train"
  )
  assert {1, 2, 3, 58, 59, 60} < set(limited.configs.labels.tolist())
  assert len(limited.configs) == 9


def test_a_second_run_in_a_working_folder_is_refused_before_it_reads_or_writes(tmp_path):
  experiment = parts.make("tile", data_root="/nowhere", **{"batch.graphs": 8})
  with files.hold(tmp_path), pytest.raises(ValueError, match="in use"):
    training.train_ranker(experiment.ranker, experiment.collections, tmp_path)
  assert all(path.name.startswith(files.LOCK) for path in tmp_path.iterdir())


def test_the_split_that_is_asked_for_is_judged_or_refused(tmp_path):
  graphs = {
    "valid": [graph_of("tile", "v", [3, 1, 2])],
    "train": [graph_of("tile", "t", [2, 5])],
    "test": [graph_of("tile", "u", [0, 0, 0])],
  }
  root = written(tmp_path / "npz", "tile", **graphs)
  experiment = fitted("tile", graphs["train"], data_root=root)
  made = {"v": [3, 1, 2], "t": [5, 2], "u": [1, 2, 3]}
  made_up(experiment.ranker.family, made)
  results.evaluate(experiment.ranker, experiment.data, tmp_path)
  results.evaluate(experiment.ranker, experiment.data, tmp_path, split="train")
  found = json.loads((tmp_path / "summary.json").read_text())
  for name, split, tau in (("validation", "valid", 1), ("train", "train", -1)):
    assert found[name]["split"] == split
    assert found[name]["metrics"]["kendaltau_mean"] == tau
  assert (tmp_path / "train.csv").exists()
  results.predict(experiment.data, experiment.ranker, tmp_path, split="train")
  ranking = submission.read_results(tmp_path / "results_train.csv")
  assert {name: found.tolist() for name, found in ranking.items()} == {"tile:xla:t": [1, 0]}
  with pytest.raises(ValueError, match="labels"):
    results.evaluate(experiment.ranker, experiment.data, tmp_path, split="test")


def test_collections_of_a_run_share_their_folds(tmp_path):
  """The two collections have the programs 0 to 5 in common, under other names and layouts."""
  names = ("layout:xla:random", "layout:xla:default")
  for collection, word in zip(names, ("random", "default")):
    folder = tmp_path.joinpath("npz", *collection.split(":"), "train")
    folder.mkdir(parents=True)
    for number in range(6):
      graph = graph_of("layout", f"{word}{number}", np.arange(1, 5 + number), seed=number)
      shared = graph_of("layout", "same length", [1], seed=number)
      graph = dataclasses.replace(
        graph, edge_index=shared.edge_index, node_opcode=shared.node_opcode
      )
      npz.write_layout(folder / f"{graph.name}.npz", graph)
  experiment = parts.make(
    "layout",
    **{"data.also": names[1:], "data.folds": 3, "data.fold": 2, "data_root": str(tmp_path / "npz")},
  )
  load = lambda split: [g for data in experiment.collections for g in data.load(split)]
  programs = {
    split: {graph.name.strip("randomefult") for graph in load(split)}
    for split in ("train", "valid", "test")
  }
  assert [len(programs[split]) for split in programs] == [2, 2, 2]
  assert set().union(*programs.values()) == set("012345")
  assert len(load("test")) == 4
  (_, also), _ = with_folders(experiment.collections, tmp_path / "run")
  keep_folds(experiment.collections, tmp_path / "run")
  assert (also / "folds.json").read_text() == (tmp_path / "run/folds.json").read_text()
  released = parts.make("layout", **{"data.also": names[1:]})
  keep_folds(released.collections, tmp_path / "run")
  assert (also / "folds.json").exists()
  forget_folds(released.collections, tmp_path / "run")  # a new run without folds
  assert not (also / "folds.json").exists()


def test_segments_take_the_same_folds_as_whole_programs(data_root):
  whole, segments = (
    parts.make("layout", variant, **{"data.folds": 3, "data_root": str(data_root)})
    for variant in ("full,ci", "xla-random,ci")
  )
  assert segments.config.task == "segments"
  for split in ("train", "valid", "test"):
    assert segments.data.files(split) == whole.data.files(split)


@pytest.mark.parametrize("fields", [{"data.folds": 5}, {"data.folds": 5, "data.fold": 1}])
def test_folds_are_part_of_the_fingerprint_of_a_run(fields):
  first, second = (
    model_file.fingerprint(parts.config_of("tile", **changes).to_dict())
    for changes in ({"data.folds": 5, "data.fold": 4}, fields)
  )
  assert first != second


def test_models_of_different_folds_are_not_judged_together():
  experiment = parts.make("tile", **{"data.folds": 3})
  other = parts.make("tile", **{"data.folds": 3, "data.fold": 1})
  ensemble = types.SimpleNamespace(rankers=[experiment.ranker, other.ranker])
  released = parts.make("tile")
  for judged, split in ((experiment, "test"), (experiment, "valid"), (released, "valid")):
    with pytest.raises(ValueError, match="another fold"):
      results.check_folds(judged.config, judged.data, ensemble, split=split)
  # No model was trained on it.
  results.check_folds(released.config, released.data, ensemble, split="test")
  alike = types.SimpleNamespace(rankers=[experiment.ranker] * 2)
  results.check_folds(experiment.config, experiment.data, alike, split="test")


@pytest.mark.parametrize("also, is_refused", [((), False), (("layout:nlp:default",), True)])
def test_models_of_different_folds_are_judged_together_on_a_collection_of_none(also, is_refused):
  make = lambda **fields: parts.make("layout", "xla-random,full,ci", **fields)
  members = [make(**{"data.folds": 3, "data.fold": k, "data.also": also}) for k in (0, 1)]
  ensemble = types.SimpleNamespace(rankers=[member.ranker for member in members])
  judged = make(**{"data.source": "nlp", "data.search": "default"})
  refused = pytest.raises(ValueError, match="another fold")
  with refused if is_refused else contextlib.nullcontext():
    results.check_folds(judged.config, judged.data, ensemble, split="valid")
