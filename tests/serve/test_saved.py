"""A trained model is one small file that is whole, or says what is wrong with it."""

import dataclasses
import json

import jobs as jobs_lib
from jobs import COLLECTIONS
import numpy as np
import pytest

import tpugraphs_jax
from tpugraphs_jax.data import features, npz
from tpugraphs_jax.graph import factor_layout_configs
from tpugraphs_jax.serve import saved
from tpugraphs_jax.serve.ensemble import COMBINATIONS, Ensemble
from tpugraphs_jax.serve.ranker import Ranker

KINDS = tuple(COLLECTIONS)


@pytest.fixture(scope="module")
def jobs():
  return jobs_lib.all_jobs()


def graph_of(jobs, kind, split="test"):
  path = npz.split_files(jobs.data_root, COLLECTIONS[kind], split)[0]
  return (npz.read_tile if kind == "tile" else npz.read_layout)(path)


def made(**changes):
  transform = features.Transform(
      np.array([0, 2]), np.array([False, True]), np.zeros(2, np.float32), np.ones(2, np.float32))
  params = {"head": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)},
            "scale": np.float32(0.5)}
  return dataclasses.replace(saved.Artefact(
      {"model": {"pooling": ("mean", "max")}, "seed": 3}, {"config": transform}, params,
      {"step": 7}), **changes)


def test_saving_and_loading_is_exact(tmp_path):
  path = tmp_path / saved.FILE
  saved.save(path, made())
  found, expected = saved.load(path), made()
  assert found.config == expected.config and found.about == {"step": 7}
  np.testing.assert_array_equal(found.params["head"]["kernel"], expected.params["head"]["kernel"])
  assert found.params["scale"] == np.float32(0.5)
  for field in ("kept", "log", "offset", "scale"):
    np.testing.assert_array_equal(
        getattr(found.transforms["config"], field), getattr(expected.transforms["config"], field))
  assert [path.name for path in tmp_path.iterdir()] == [saved.FILE]


def test_the_same_model_gives_the_same_bytes(tmp_path):
  for name in ("a.npz", "b.npz"):
    saved.save(tmp_path / name, made())
  assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def rewritten(path, change):
  """The file with its arrays and card changed."""
  with np.load(path) as file:
    arrays = {name: file[name] for name in file.files}
  card = json.loads(arrays["card"].tobytes())
  change(arrays, card)
  arrays["card"] = np.frombuffer(json.dumps(card).encode(), np.uint8)
  np.savez(path, **arrays)


def add_one(arrays, card):
  del card
  arrays["params/scale"] = arrays["params/scale"] + 1


def newer(arrays, card):
  del arrays
  card["format"] = saved.FORMAT + 1


def without(field):
  return lambda arrays, card: card.pop(field)


@pytest.mark.parametrize("change, complaint", [
    (add_one, "damaged .*checksum"), (newer, "is of format 2, .* reads up to 1: pip install"),
    *((without(field), "damaged") for field in ("format", "config", "transforms", "about",
                                                "checksum")),
])
def test_a_changed_file_is_refused_in_one_line(change, complaint, tmp_path):
  path = tmp_path / saved.FILE
  saved.save(path, made())
  rewritten(path, change)
  with pytest.raises(ValueError, match=complaint) as error:
    saved.load(path)
  assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_cut_and_flipped_bytes_never_give_a_model(tmp_path):
  path = tmp_path / saved.FILE
  saved.save(path, made())
  whole, rng = path.read_bytes(), np.random.default_rng(0)
  for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:length])
    with pytest.raises(ValueError, match="damaged"):
      saved.load(path)
  for place in rng.integers(0, len(whole), 200):
    flipped = bytearray(whole)
    flipped[place] ^= 1 << int(rng.integers(8))
    path.write_bytes(flipped)
    try:
      found = saved.load(path)
    except ValueError as error:
      assert "damaged" in str(error) or "format" in str(error)
    else:  # a byte of the archive that carries nothing
      assert found.about == {"step": 7} and found.params["scale"] == np.float32(0.5)


def test_names_that_cannot_be_printed_are_escaped(tmp_path):
  path = tmp_path / saved.FILE
  saved.save(path, made())
  start, end = path.read_bytes().rsplit(b"params/scale", 1)  # in the archive's directory
  path.write_bytes(start + b"params/sc\a\ne" + end)
  with pytest.raises(ValueError, match="damaged") as error:
    saved.load(path)
  assert str(error.value).isprintable()


def test_a_missing_file_says_so(tmp_path):
  with pytest.raises(FileNotFoundError, match="model.npz is missing: name a folder that a model"):
    saved.load(tmp_path / saved.FILE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_alone_ranks_as_the_folder_does(kind, jobs, tmp_path):
  workdir, graph = jobs.workdir(f"{kind}_whole"), graph_of(jobs, kind)
  source = workdir / saved.FILE
  assert source.stat().st_size < 500_000
  copy = tmp_path / "elsewhere.npz"
  copy.write_bytes(source.read_bytes())
  expected = tpugraphs_jax.rank(workdir, graph)
  for place in (copy, source):
    found = tpugraphs_jax.rank(place, graph)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_best_checkpoint(kind, jobs):
  workdir = jobs.workdir(f"{kind}_whole")
  found, best = saved.load(workdir / saved.FILE), saved.read(workdir)
  assert found.about["step"] == best.about["step"]
  assert found.about["valid_sample"]["opa_pooled"] > 0 and "jax" in found.about["versions"]
  assert json.dumps(found.config, default=list)
  assert "data_root" not in found.config


@pytest.mark.parametrize("combine", ["mean", "min_max", "rank"])
def test_an_ensemble_averages_what_it_says(combine, jobs):
  graph = graph_of(jobs, "tile")
  places = [jobs.workdir("tile_whole"), jobs.workdir("tile_two_devices")]
  each = [tpugraphs_jax.load(place).scores([graph])[0].astype(np.float64) for place in places]
  if combine == "min_max":
    each = [(s - min(s)) / (max(s) - min(s)) for s in each]
  elif combine == "rank":
    each = [[np.mean([sum(other < one for other in s) + 1, sum(other <= one for other in s)])
             for one in s] for s in each]
  ensemble = Ensemble(places, combine=combine)
  (scores,) = ensemble.scores([graph])
  some = np.array([4, 0, 2])
  members = [ranker.scores([graph], [some])[0] for ranker in ensemble.rankers]
  combine_of = COMBINATIONS[combine]
  np.testing.assert_allclose(
      ensemble.scores([graph], [some])[0], np.mean([combine_of(m) for m in members], axis=0),
      rtol=1e-6)
  np.testing.assert_allclose(scores, np.mean(each, axis=0), rtol=1e-12)
  np.testing.assert_array_equal(ensemble.rank(graph)[0], np.argsort(scores, kind="stable"))


def test_an_ensemble_of_different_collections_is_refused(jobs):
  with pytest.raises(ValueError, match="models of one collection: .* is of tile:xla, .* is of lay"):
    Ensemble([jobs.workdir("tile_whole"), jobs.workdir("layout_whole")])
  with pytest.raises(ValueError, match="combine is 'median', expected one of mean, min_max, rank"):
    Ensemble([jobs.workdir("tile_whole")], combine="median")
  with pytest.raises(ValueError, match="at least one folder"):
    Ensemble([])


@pytest.mark.parametrize("kind", KINDS)
def test_charges_are_what_an_exchanged_choice_changes(kind, jobs):
  """Each row against a graph whose configuration is written out by hand."""
  ranker, graph = Ranker.load(jobs.workdir(f"{kind}_whole")), graph_of(jobs, kind)
  order, scores = ranker.rank(graph)
  worst, best = int(order[-1]), int(order[0])
  rows = ranker.explain(graph, worst)
  assert rows and [row.score for row in rows] == sorted((r.score for r in rows), reverse=True)
  for row in rows[:3]:
    if kind == "tile":
      feat = graph.configs.config_feat[[worst]].copy()
      feat[0, row.choice[0]] = row.instead[1]
      assert feat[0, row.choice[0]] == graph.configs.config_feat[best, row.choice[0]]
      configs = dataclasses.replace(
          graph.configs, config_feat=feat, runtime_ns=np.zeros(1, np.int64),
          normalizer_ns=np.ones(1, np.int64))
    else:
      decoded = graph.configs.decode(np.array([worst, best]))
      places = [list(graph.config_node).index(node) for node in row.nodes]
      assert all(tuple(decoded[0, place]) == row.choice for place in places)
      decoded[0, places] = decoded[1, places]
      configs = factor_layout_configs(decoded[:1], np.zeros(1, np.int64))
    (changed,) = ranker.scores([dataclasses.replace(graph, configs=configs)])
    assert row.score == pytest.approx(scores[worst] - changed[0], abs=1e-4)
  assert ranker.explain(graph, best) == []
  with pytest.raises(ValueError, match="configuration 99999 of .*, expected 0 to"):
    ranker.explain(graph, 99999)
