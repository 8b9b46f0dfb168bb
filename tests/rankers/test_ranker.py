"""A working folder, a model file or a model that ships ranks a graph, as the commands do."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from tests.support import commands, comparing, small_runs
from tests.support.small_runs import COLLECTIONS
import tpugraphs_jax
from tpugraphs_jax import metrics, submission
from tpugraphs_jax.data import npz, transforms
from tpugraphs_jax.data.factoring import factor_layout_configs
from tpugraphs_jax.graph import TileConfigs
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ranker

KINDS = tuple(COLLECTIONS)


@pytest.fixture(scope="module")
def runs():
  return small_runs.all_runs()


@functools.cache
def graph_of(kind, split="test", number=0):
  path = npz.split_files(small_runs.all_runs().data_root, COLLECTIONS[kind], split)[number]
  return (npz.read_tile if kind == "tile" else npz.read_layout)(path)


def with_configs(graph, ids, runtime=None):
  """The graph with the configurations of `ids`, which may repeat."""
  configs = graph.configs.subset(ids)
  if runtime is not None:
    field = "runtime_ns" if isinstance(configs, TileConfigs) else "labels"
    configs = dataclasses.replace(configs, **{field: runtime})
  return dataclasses.replace(graph, configs=configs)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_agrees_with_the_results_of_the_command(runs, kind):
  """Other devices and shapes round differently: only near ties may change places."""
  workdir = runs.workdir(f"{kind}_whole")
  results = submission.read_results(workdir / "results.csv")
  graph = graph_of(kind)
  order, scores = tpugraphs_jax.rank(workdir, graph)
  assert scores.shape == (len(graph.configs),) and scores.dtype == np.float32
  np.testing.assert_array_equal(order, np.argsort(scores, kind="stable"))
  written = results[f"{COLLECTIONS[kind]}:{graph.name}"]
  np.testing.assert_array_equal(np.sort(written), np.arange(len(scores)))
  assert np.ptp(scores) > 0
  np.testing.assert_allclose(scores[written], scores[order], atol=1e-4 * np.ptp(scores))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_configurations_stay_in_file_order(runs, kind, caplog):
  """Also across chunks: a score does not depend on the place of its configuration."""
  graph = graph_of(kind)
  order, scores = tpugraphs_jax.rank(
    runs.workdir(f"{kind}_whole"), with_configs(graph, np.full(230, 3))
  )
  assert len(np.unique(scores)) == 1
  np.testing.assert_array_equal(order, np.arange(230))
  assert "equal scores" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_labels_have_no_influence_and_one_configuration_is_enough(runs, kind):
  workdir, graph = runs.workdir(f"{kind}_whole"), graph_of(kind, "valid")
  assert graph.configs.is_labelled
  ids = np.arange(9)
  labelled = tpugraphs_jax.rank(workdir, with_configs(graph, ids))
  unlabelled = tpugraphs_jax.rank(workdir, with_configs(graph, ids, np.zeros(9, np.int64)))
  np.testing.assert_array_equal(labelled, unlabelled)
  order, scores = tpugraphs_jax.rank(workdir, with_configs(graph, ids[4:5]))
  np.testing.assert_array_equal(order, [0])
  np.testing.assert_allclose(scores[0], labelled[1][4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, other", [("tile", "layout"), ("layout", "tile")])
def test_a_graph_of_another_kind_is_refused(runs, kind, other):
  workdir = runs.workdir(f"{kind}_whole")
  with pytest.raises(ValueError, match="Configs; the model ranks"):
    tpugraphs_jax.rank(workdir, graph_of(other))


def test_a_program_from_another_stage_is_warned_of_once(caplog):
  path = commands.ROOT / "data/own/npz/layout/own/programs_cpu/test/experts_layer.npz"
  graph = tpugraphs_jax.read_layout(path)
  graph = dataclasses.replace(graph, stage="as jax lowers it", name="of_another_stage")
  for _ in range(2):
    tpugraphs_jax.rank("layout-v3-estimate", graph)
  assert caplog.text.count("less reliable") == 1


def test_a_folder_without_a_model_says_what_is_missing(runs, tmp_path):
  with pytest.raises(FileNotFoundError, match="model.npz"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))
  shutil.copytree(runs.workdir("tile_whole") / "checkpoints", tmp_path / "checkpoints")
  with pytest.raises(FileNotFoundError, match="model.npz"):
    tpugraphs_jax.rank(tmp_path, graph_of("tile"))


def test_scores_that_are_not_finite_are_refused(runs):
  ranker = Ranker.load(runs.workdir("tile_whole"))
  ranker.params = jax.tree.map(lambda leaf: np.full_like(leaf, np.inf), ranker.params)
  with pytest.raises(FloatingPointError, match="finite"):
    ranker.rank(graph_of("tile"))


def load(runs, changes):
  config = Config.from_dict(model_file.config_of(runs.workdir("tile_whole")))
  return Ranker.load(runs.workdir("tile_whole"), config.replace(**changes)).params


@pytest.mark.parametrize(
  "field, value",
  [
    ("model.hidden_dim", 16),
    ("model.name", "LateJoinSAGE"),
    ("data.pad_value", -1),
    ("loss.temperature", 2.0),
    ("seed", 7),
  ],
)
def test_a_checkpoint_of_another_config_is_refused(runs, field, value):
  with pytest.raises(ValueError, match=field):
    load(runs, {field: value})


def test_what_a_model_does_not_depend_on_may_change(runs):
  free = {
    "eval.configs": 7,
    "eval.graphs": 2,
    "train.epochs": 50,
    "data.skip_bad_files": True,
    "batch.config_chunk": 4,
    "data.loader_threads": 2,
    "data_root": "/elsewhere",
    "profile_steps": "1:2",
  }
  expected, found = load(runs, {}), load(runs, free)
  np.testing.assert_array_equal(
    found["op_embedding"]["table"]["embedding"], expected["op_embedding"]["table"]["embedding"]
  )


def made():
  transform = transforms.Transform(
    np.array([0, 2]), np.array([False, True]), np.zeros(2, np.float32), np.ones(2, np.float32)
  )
  params = {
    "head": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)},
    "scale": np.float32(0.5),
  }
  config = {"task": "layout", "data": {}, "extensions": (), "seed": 3}
  config["model"] = {"pooling": ("mean", "max")}
  return model_file.Artefact(config, {"config": transform}, params, {"step": 7})


def test_saving_and_loading_is_exact(tmp_path):
  path = tmp_path / model_file.MODEL_FILE
  model_file.write(path, made())
  found, expected = model_file.read_file(path), made()
  assert found.config == expected.config and found.about == {"step": 7}
  comparing.assert_same_trees(found.params, expected.params)
  comparing.assert_same_fields(found.transforms["config"], expected.transforms["config"])
  assert [path.name for path in tmp_path.iterdir()] == [model_file.MODEL_FILE]


def rewritten(path, change):
  """The file with its arrays and card changed."""
  with np.load(path) as file:
    arrays = {name: file[name] for name in file.files}
  card = json.loads(arrays["card"].tobytes())
  change(arrays, card)
  arrays["card"] = np.frombuffer(json.dumps(card).encode(), np.uint8)
  np.savez(path, **arrays)


@pytest.mark.parametrize(
  "change, complaint",
  [
    (lambda arrays, card: arrays.update({"params/scale": arrays["params/scale"] + 1}), "checksum"),
    (lambda arrays, card: card.update(format=model_file.FORMAT + 1), "install a newer one"),
    *(
      (lambda arrays, card, field=field: card.pop(field), "damaged")
      for field in ("format", "config", "transforms", "about", "checksum")
    ),
  ],
)
def test_a_changed_file_is_refused_in_one_line(change, complaint, tmp_path):
  path = tmp_path / model_file.MODEL_FILE
  model_file.write(path, made())
  rewritten(path, change)
  with pytest.raises(ValueError, match=complaint) as error:
    model_file.read_file(path)
  assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_names_that_cannot_be_printed_are_escaped(tmp_path):
  path = tmp_path / model_file.MODEL_FILE
  model_file.write(path, made())
  start, end = path.read_bytes().rsplit(b"params/scale", 1)  # in the archive's directory
  path.write_bytes(start + b"params/sc\a\ne" + end)
  with pytest.raises(ValueError, match="damaged") as error:
    model_file.read_file(path)
  assert str(error.value).isprintable()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_alone_ranks_as_the_folder_does(kind, runs, tmp_path):
  workdir, graph = runs.workdir(f"{kind}_whole"), graph_of(kind)
  source = workdir / model_file.MODEL_FILE
  assert source.stat().st_size < 500_000
  copy = tmp_path / "elsewhere.npz"
  copy.write_bytes(source.read_bytes())
  expected = tpugraphs_jax.rank(workdir, graph)
  for place in (copy, source):
    found = tpugraphs_jax.rank(place, graph)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_loaded_ranker_is_kept_until_its_file_changes(runs, tmp_path):
  path = tmp_path / "model.npz"
  shutil.copy(runs.workdir("tile_whole") / model_file.MODEL_FILE, path)
  for place in (path, "layout-cpu-measured"):
    assert tpugraphs_jax.load(place).family is tpugraphs_jax.load(str(place)).family
  before = tpugraphs_jax.load(path)
  os.utime(path, ns=(0, 0))
  assert tpugraphs_jax.load(path).family is not before.family


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_of_the_same_time_that_replaces_another_is_loaded(tmp_path, in_folder, in_place):
  path, other = tmp_path / "model.npz", tmp_path / "other.npz"
  for name, file in {"layout-cpu-measured": path, "layout-v3-estimate": other}.items():
    shutil.copy(model_file.SHIPPED / f"{name}.npz", file)
    os.utime(file, (1, 1))
  place = tmp_path if in_folder else path
  assert not tpugraphs_jax.load(place).target  # measured
  if in_place:
    path.write_bytes(other.read_bytes())
    os.utime(path, (1, 1))
  else:
    os.replace(other, path)
  assert tpugraphs_jax.load(place).target == "tpu:v3"


def test_a_change_of_a_loaded_ranker_stays_its_own(runs, tmp_path):
  path, graph = tmp_path / "model.npz", graph_of("tile")
  shutil.copy(runs.workdir("tile_whole") / model_file.MODEL_FILE, path)
  expected = tpugraphs_jax.rank(path, graph)[1]
  changed = tpugraphs_jax.load(path)
  name = next(iter(changed.params))
  changed.params[name] = jax.tree.map(np.zeros_like, changed.params[name])
  changed.about["step"] = 99
  assert (changed.rank(graph)[1] != expected).any()
  np.testing.assert_array_equal(tpugraphs_jax.rank(path, graph)[1], expected)
  again = tpugraphs_jax.load(path)
  assert again.about["step"] != 99
  changed = tpugraphs_jax.load(path)
  changed.params = None
  np.testing.assert_array_equal(tpugraphs_jax.load(path).rank(graph)[1], expected)


def test_a_family_that_was_taken_before_has_the_transforms_which_are_set_once(runs):
  trained, graph = Ranker.load(runs.workdir("tile_whole")), graph_of("tile")
  ranker = Ranker(trained.config)
  family = ranker.family
  copied = ranker.copy()
  ranker.use_transforms(trained.transforms, where="here")
  expected, prepared = trained.rank(graph)[1], [ranker.prepare(graph)]
  for taken in (family, ranker.family):
    np.testing.assert_array_equal(taken.scores(trained.params, prepared)[0], expected)
  assert copied.family.config_transform is None  # an untrained copy gets its own
  for again in (
    lambda: ranker.use_transforms(trained.transforms, where="here"),
    lambda: ranker.fit_configs([graph.configs.config_feat]),
    lambda: trained.copy().use_transforms(trained.transforms, where="here"),
  ):
    with pytest.raises(ValueError, match="has its transforms"):
      again()


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_best_checkpoint(kind, runs):
  workdir = runs.workdir(f"{kind}_whole")
  found = model_file.read_file(workdir / model_file.MODEL_FILE)
  best = json.loads((workdir / "summary.json").read_text())["training"]["best"]
  assert found.about["step"] == best["step"]
  config, collection = model_file.config_of(workdir), Ranker.load(workdir).collection
  files = npz.split_files(config["data_root"], collection.name, "train")
  assert 0 < len(found.about["training_graphs"]) <= len(files)
  assert set(found.about["training_graphs"]) <= {file.stem for file in files}
  assert found.about["valid_sample"]["opa_pooled"] > 0 and "jax" in found.about["versions"]
  assert json.dumps(found.config, default=list)
  assert "data_root" not in found.config


@pytest.mark.parametrize("kind", KINDS)
def test_a_charge_is_the_score_change_of_one_exchanged_choice(kind, runs):
  """Each row against a graph whose configuration is written out by hand."""
  ranker, graph = Ranker.load(runs.workdir(f"{kind}_whole")), graph_of(kind)
  order, scores = ranker.rank(graph)
  worst, best = int(order[-1]), int(order[0])
  rows = ranker.explain(graph, worst)
  sizes = [abs(row.change) for row in rows]
  assert rows and sizes == sorted(sizes, reverse=True)
  for row in rows[:3]:
    if kind == "tile":
      feat = graph.configs.config_feat[[worst]].copy()
      feat[0, row.choice[0]] = row.instead[1]
      assert feat[0, row.choice[0]] == graph.configs.config_feat[best, row.choice[0]]
      times = dict(runtime_ns=np.zeros(1, np.int64), normalizer_ns=np.ones(1, np.int64))
      configs = dataclasses.replace(graph.configs, config_feat=feat, **times)
    else:
      decoded = graph.configs.decode(np.array([worst, best]))
      places = [list(graph.config_node).index(node) for node in row.places]
      assert all(tuple(decoded[0, place]) == row.choice for place in places)
      decoded[0, places] = decoded[1, places]
      configs = factor_layout_configs(decoded[:1], np.zeros(1, np.int64))
    (changed,) = ranker.scores([dataclasses.replace(graph, configs=configs)])
    assert row.change == pytest.approx(scores[worst] - changed[0], abs=1e-4)
  assert ranker.explain(graph, best) == []
  with pytest.raises(ValueError, match="99999"):
    ranker.explain(graph, 99999)


_OWN = commands.ROOT / "data" / "own" / "npz"


def _held_out(ranker):
  """Programs of families that the model was not trained on."""
  folder = _OWN.joinpath(*ranker.collection.name.split(":"))
  return [
    npz.read_layout(path)
    for split in ("valid", "test")
    for path in sorted((folder / split).glob("*.npz"))
  ]


@pytest.mark.parametrize(
  "name, program, scores",
  [
    ("layout-cpu-measured", "programs_cpu/test/experts_layer", [-0.586278, 2.606984, 2.249229]),
    (
      "layout-cpu-measured",
      "programs_cpu/test/state_space_selective",
      [-0.538907, 0.755371, 0.552648],
    ),
    ("layout-v3-estimate", "outputs/test/generated_test_decoder_0", [0.0, 0.0, 0.020618]),
  ],
)
def test_shipped_models_give_their_recorded_scores(name, program, scores):
  graph = npz.read_layout(_OWN / "layout" / "own" / f"{program}.npz")
  np.testing.assert_allclose(tpugraphs_jax.rank(name, graph)[1][:3], scores, rtol=1e-4, atol=2e-6)


def test_something_else_than_a_model_is_refused_with_its_type():
  with pytest.raises(ValueError, match="int"):
    tpugraphs_jax.rank(3, None)
  with pytest.raises(ValueError, match="Ensemble"):  # has no tables of its own
    tpugraphs_jax.explain(tpugraphs_jax.Ensemble(["layout-cpu-measured"]), None, 0)


@pytest.mark.parametrize("name", model_file.shipped_names())
def test_shipped_models_order_programs_of_other_families_better_than_chance(name):
  ranker = tpugraphs_jax.load(name)
  graphs = _held_out(ranker)
  found = [
    metrics.kendall_tau(scores, graph.configs.labels)
    for graph, scores in zip(graphs, ranker.scores(graphs))
  ]
  assert len(found) >= 5
  assert np.mean(found) > 2 * np.std(found) / np.sqrt(len(found))


def test_a_name_of_a_model_that_ships_is_that_model_whatever_the_current_folder_has(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(model_file, "SHIPPED", tmp_path / "shipped")
  model_file.SHIPPED.mkdir()
  (model_file.SHIPPED / "a-model.npz").touch()
  (model_file.SHIPPED / "a-model.md").write_text("# a-model")
  monkeypatch.chdir(tmp_path)
  assert model_file.shipped_names() == ["a-model"] and model_file.card("a-model") == "# a-model"
  assert model_file.shipped_file("a-model") == model_file.SHIPPED / "a-model.npz"
  for place in ("out/a-model", "./deep/a-model"):
    assert str(model_file.shipped_file(place)) == str(pathlib.Path(place))
  with pytest.raises(FileNotFoundError, match="a-model"):
    model_file.shipped_file("other")
  (tmp_path / "a-model").mkdir()  # perhaps from somebody else
  assert model_file.shipped_file("a-model") == model_file.SHIPPED / "a-model.npz"
  assert model_file.shipped_file("./a-model") == pathlib.Path("a-model")
  (tmp_path / "mine").mkdir()
  assert model_file.shipped_file("mine") == pathlib.Path("mine")
  with pytest.raises(ValueError, match="a-model"):
    model_file.card("b")
