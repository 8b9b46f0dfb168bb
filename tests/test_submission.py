"""Writing, reading, combining and checking ranking files."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tests.support import comparing
from tpugraphs_jax import datasets, submission
from tpugraphs_jax.data import folds

CONFIGS = {
  "tile:xla": {"1a": 9, "2b": 3},
  "layout:xla:random": {"1a": 4},
  "layout:nlp:default": {"bert": 6, "albert": 2},
}


def _rankings(collection, *, top=None):
  """A valid ranking per graph of the collection, slowest index first."""
  return {name: np.arange(configs)[::-1][:top] for name, configs in CONFIGS[collection].items()}


def _write_files(root, split, runtimes):
  """Files of graphs with only what checking and scoring read."""
  for collection, graphs in runtimes.items():
    folder = root.joinpath(*collection.split(":"), split)
    folder.mkdir(parents=True)
    for name, runtime in graphs.items():
      arrays = {"config_runtime": np.array(runtime, np.int64)}
      if collection.startswith("tile"):
        arrays["config_runtime_normalizers"] = np.full(len(runtime), 100, np.int64)
      np.savez_compressed(folder / f"{name}.npz", **arrays)
  return root


def _ranked(tmp_path, rankings):
  """A submission with these rankings, by collection and graph."""
  files = []
  for collection, by_name in rankings.items():
    files.append(tmp_path / f"{len(files)}.csv")
    submission.write_results(
      files[-1], collection, {name: np.array(ranking) for name, ranking in by_name.items()}
    )
  submission.combine(tmp_path / "valid.csv", files)
  return tmp_path / "valid.csv"


@pytest.fixture(name="data_root")
def _data_root(tmp_path):
  """Test graphs of three collections, without labels."""
  runtimes = {
    collection: {name: [0] * configs for name, configs in graphs.items()}
    for collection, graphs in CONFIGS.items()
  }
  return _write_files(tmp_path / "npz", "test", runtimes)


@pytest.fixture(name="good")
def _good(tmp_path):
  """A complete submission as its lines, the header first."""
  return _ranked(tmp_path, {name: _rankings(name) for name in CONFIGS}).read_text().splitlines()


def _write_lines(tmp_path, lines):
  path = tmp_path / "submission.csv"
  path.write_text("\n".join(lines) + "\n")
  return path


def test_file_has_header_ids_and_indices_from_fast_to_slow(tmp_path):
  path = tmp_path / "results.csv"
  submission.write_results(path, "tile:xla", {"7f": np.array([3, 0, 2])})
  assert path.read_text() == "ID,TopConfigs\ntile:xla:7f,3;0;2\n"


@pytest.mark.parametrize("collection", datasets.RELEASED)
def test_reading_gives_back_what_was_written(tmp_path, collection):
  path = tmp_path / "results.csv"
  # Of the largest graph: longer than the field limit of usual CSV readers.
  ranking = np.random.default_rng(0).permutation(124_000)
  submission.write_results(path, collection, {"a": ranking, "b": np.array([0])})
  read = submission.read_results(path)
  assert list(read) == [f"{collection}:a", f"{collection}:b"]
  np.testing.assert_array_equal(read[f"{collection}:a"], ranking)
  np.testing.assert_array_equal(read[f"{collection}:b"], [0])
  assert submission.split_id(f"{collection}:a") == (collection, "a")


@pytest.mark.parametrize(
  "collection, name, ranking",
  [
    ("layout:xla", "a", [0]),
    ("tile:xla", "a,b", [0]),
    ("tile:xla", "a:b", [0]),
    ("tile:xla", "", [0]),
    ("tile:xla", "a", [0, 1, 0]),
    ("tile:xla", "a", [0, -1]),
    ("tile:xla", "a", [0.0, 1.0]),
    ("tile:xla", "a", [[0, 1]]),
    ("tile:xla", "a", np.zeros(0, int)),
    ("layout:xla:random", "a", [0, 2]),
  ],
)
def test_bad_rankings_are_not_written(tmp_path, collection, name, ranking):
  path = tmp_path / "results.csv"
  path.write_text("kept")
  with pytest.raises(ValueError) as error:
    submission.write_results(path, collection, {name: np.array(ranking)})
  assert "\n" not in str(error.value)
  assert path.read_text() == "kept"


def test_combining_keeps_every_row_and_counts_them(tmp_path):
  path = _ranked(tmp_path, {name: _rankings(name) for name in CONFIGS})
  rows = submission.combine(tmp_path / "all.csv", [path])
  assert rows == {name: len(CONFIGS.get(name, ())) for name in datasets.RELEASED}
  combined = submission.read_results(tmp_path / "all.csv")
  expected = {
    f"{collection}:{name}": ranking.tolist()
    for collection in CONFIGS
    for name, ranking in _rankings(collection).items()
  }
  assert list(expected.items()) == [(row, found.tolist()) for row, found in combined.items()]


def test_graph_in_two_files_is_refused_naming_both_rows(tmp_path):
  files = [tmp_path / "a.csv", tmp_path / "b.csv"]
  submission.write_results(files[0], "tile:xla", {"x": np.arange(5)})
  submission.write_results(files[1], "tile:xla", {"y": np.arange(5), "x": np.arange(5)})
  with pytest.raises(ValueError) as error:
    submission.combine(tmp_path / "all.csv", files)
  assert str(error.value).startswith(f"{files[1]}:3: tile:xla:x is already in {files[0]}:2")
  assert not (tmp_path / "all.csv").exists()


def test_layout_row_that_was_cut_short_is_not_combined(tmp_path):
  path = _write_lines(tmp_path, ["ID,TopConfigs", "layout:xla:random:a,3;0;1"])
  with pytest.raises(ValueError, match="csv:2"):
    submission.combine(tmp_path / "all.csv", [path])


_ROWS = (
  "tile:xla:a",
  "tile:xla:a,1,2",
  '"tile:xla:a,1',
  "tile:a,1",
  "tile:xla:,1",
  "tile:xla:a,",
  "tile:xla:a,1;",
  "tile:xla:a,1;-2",
  "tile:xla:a,1.0",
  "tile:xla:a,1 2",
  "tile:xla:a,99999999999999999999",
)


@pytest.mark.parametrize(
  "lines, number",
  [
    ([], 1),
    (["id,TopConfigs"], 1),
    *((["ID,TopConfigs", row], 2) for row in _ROWS),
    (["ID,TopConfigs", "tile:xla:a,1", "tile:xla:b,1", "tile:xla:a,2"], 4),
  ],
)
def test_unreadable_lines_are_refused_naming_file_and_line(tmp_path, lines, number):
  path = _write_lines(tmp_path, lines)
  with pytest.raises(ValueError) as error:
    submission.read_results(path)
  assert str(error.value).startswith(f"{path}:{number}: ")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "text, encoding",
  [
    ("ID,TopConfigs\ntile:xla:a,1;0\n\n \n", "utf-8"),
    ("ID,TopConfigs\r\ntile:xla:a,1;0\r\n,\r\n", "utf-8-sig"),
    ('"ID","TopConfigs"\n"tile:xla:a","1;0"', "utf-8"),
  ],
  ids=["blank lines", "of a spreadsheet", "quoted"],
)
def test_csv_of_other_programs_is_read(tmp_path, text, encoding):
  (path := tmp_path / "a.csv").write_bytes(text.encode(encoding))
  assert {key: row.tolist() for key, row in submission.read_results(path).items()} == {
    "tile:xla:a": [1, 0]
  }


def test_tile_rows_need_the_best_five_only(tmp_path, data_root):
  path = _ranked(
    tmp_path, {name: _rankings(name, top=5 if name == "tile:xla" else None) for name in CONFIGS}
  )
  assert submission.check(path, data_root) == []


@pytest.mark.parametrize(
  "line, row",
  [
    (2, "tile:xla:1a,8;7;6;5"),
    (2, "tile:xla:1a,8;7;6;5;9"),
    (2, "tile:xla:1a,8;7;6;5;8"),
    (3, "tile:xla:2b,0;1"),
    (4, "layout:xla:random:1a,0;1;2"),
    (4, "layout:xla:random:1a,0;1;2;2"),
    (4, "layout:xla:random:1a,0;1;2;3;4"),
  ],
)
def test_wrong_ranking_is_named_with_its_row(tmp_path, good, data_root, line, row):
  good[line - 1] = row
  path = _write_lines(tmp_path, good)
  (problem,) = submission.check(path, data_root)
  assert problem.startswith(f"{path}:{line}: {row.split(',')[0]} names ")


def test_every_missing_and_foreign_graph_is_named(tmp_path, good, data_root):
  good[1:3] = ["tile:xla:other,0;1;2;3;4", "layout:xla:default:1a,0;1;2;3"]
  path = _write_lines(tmp_path, good)
  problems = submission.check(path, data_root)
  assert [problem.split(": ")[1].split(" ")[0:3] for problem in problems] == [
    ["tile:xla:other", "is", "not"],
    ["layout:xla:default:1a", "is", "not"],
    ["tile:xla:1a", "has", "no"],
    ["tile:xla:2b", "has", "no"],
  ]


def test_damaged_test_graph_is_named(tmp_path, good, data_root):
  damaged = data_root / "tile" / "xla" / "test" / "1a.npz"
  np.savez(damaged, config_runtime=np.int64(3))
  with pytest.raises(ValueError, match="config_runtime"):
    submission.check(_write_lines(tmp_path, good), data_root)


LABELS = {
  "tile:xla": {"1a": [30, 10, 40, 20, 50, 60, 25], "2b": [7, 8]},
  "layout:xla:random": {"net": [5, 3, 9, 3], "flat": [4, 4, 4]},
}


@pytest.fixture(name="labelled")
def _labelled(tmp_path):
  """Validation graphs of two collections."""
  return _write_files(tmp_path / "labelled", "valid", LABELS)


TILES = {"1a": [2, 0, 4, 5, 6], "2b": [1, 0]}
LAYOUTS = {"net": [1, 0, 3, 2], "flat": [0, 1, 2]}


def test_scores_are_those_of_the_competition(labelled, tmp_path):
  found = submission.score(
    _ranked(tmp_path, {"tile:xla": TILES, "layout:xla:random": LAYOUTS}), labelled
  )
  # Best of five against best of all: 25 and 10 in 1a; 7 and 7 in 2b, which has two.
  assert found["tile:xla"] == (pytest.approx(((1 - 1.5) + 1) / 2), 2, [])
  # The graph with equal runtimes has no order and is left out of the mean.
  value, graphs, without_order = found["layout:xla:random"]
  assert value == pytest.approx(
    stats.kendalltau(np.argsort(LAYOUTS["net"]), LABELS["layout:xla:random"]["net"]).statistic
  )
  assert (graphs, without_order) == (2, ["flat"])


def test_graphs_without_an_order_are_named_and_no_score_comes_from_them_alone(tmp_path, capsys):
  arguments = ["score", str(tmp_path / "valid.csv"), "--data_root", str(tmp_path / "labelled")]
  flat = {"flat": [4, 4, 4], "single": [7]}
  path = _write_files(tmp_path / "labelled", "valid", {"layout:xla:random": flat})
  rankings = {"flat": [0, 1, 2], "single": [0]}
  _ranked(tmp_path, {"layout:xla:random": rankings})
  assert submission.main(arguments) == 2
  out, err = capsys.readouterr()
  assert not out and err.startswith("error: layout:xla:random") and err.count("\n") == 1
  (path / "layout" / "xla" / "random" / "valid" / "flat.npz").unlink()
  np.savez(path / "layout" / "xla" / "random" / "valid" / "net.npz", config_runtime=[3, 9])
  _ranked(tmp_path, {"layout:xla:random": {"net": [0, 1], "single": [0]}})
  assert submission.main(arguments) == 0
  assert (
    "1.0000  Kendall tau, mean of 1 of 2 graphs; single has no order\n" in capsys.readouterr().out
  )


def test_kernels_are_scored_by_runtime_over_normalizer(labelled, tmp_path):
  normalizer = [100, 20, 100, 100, 100, 100, 100]
  path = labelled / "tile" / "xla" / "valid" / "1a.npz"
  np.savez_compressed(
    path, config_runtime=LABELS["tile:xla"]["1a"], config_runtime_normalizers=normalizer
  )
  found = submission.score(_ranked(tmp_path, {"tile:xla": TILES}), labelled)
  # The quotients of 1a are 0.3, 0.5, 0.4, 0.2, 0.5, 0.6 and 0.25: configuration 6 against 3.
  assert found["tile:xla"] == (pytest.approx(((1 - 0.25) + 1) / 2), 2, [])


@pytest.mark.parametrize(
  "tiles, complaint",
  [
    ({"1a": [0, 1, 2, 3], "2b": [1, 0]}, "1a"),
    ({"1a": [0, 1, 2, 3, 9], "2b": [1, 0]}, "1a"),
    ({"1a": [0, 1, 2, 3, 4]}, "2b"),
    (TILES | {"other": [0, 1]}, "other"),
  ],
)
def test_rankings_that_fail_the_check_are_not_scored(labelled, tmp_path, tiles, complaint, capsys):
  path = _ranked(tmp_path, {"tile:xla": tiles})
  assert submission.main(["score", str(path), "--data_root", str(labelled)]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert complaint in line


@pytest.mark.parametrize(
  "changes", [{"config_runtime": [7, -8]}, {"config_runtime_normalizers": [100, 0]}]
)
def test_times_that_are_not_positive_are_refused_with_their_file(labelled, tmp_path, changes):
  path = labelled / "tile" / "xla" / "valid" / "2b.npz"
  with np.load(path) as file:
    np.savez(path, **dict(file) | changes)
  with pytest.raises(ValueError, match=f"2b.npz: {next(iter(changes))} .*positive"):
    submission.score(_ranked(tmp_path, {"tile:xla": TILES}), labelled)


def test_a_split_without_labels_is_not_scored(data_root, tmp_path):
  path = _ranked(tmp_path, {"tile:xla": {"1a": range(9), "2b": range(3)}})
  with pytest.raises(ValueError, match="labels"):
    submission.score(path, data_root, split="test")


def test_a_file_without_rows_is_not_scored(labelled, tmp_path):
  path = tmp_path / "empty.csv"
  path.write_text("ID,TopConfigs\n")
  with pytest.raises(ValueError, match="no row"):
    submission.score(path, labelled)


def _write_folds(root, folder):
  """Nine labelled graphs in folds of three, and the rankings of three runs, perfect in fold 0."""
  rng = np.random.default_rng(0)
  labels = {f"net{number}": rng.permutation(8) + 1 for number in range(9)}
  splits = {name: "valid" if number > 5 else "train" for number, name in enumerate(labels)}
  for split in ("train", "valid"):
    some = {name: runtime for name, runtime in labels.items() if splits[name] == split}
    _write_files(root, split, {"layout:xla:random": some})
  fold_of = {f"{splits[name]}/{name}": number % 3 for number, name in enumerate(labels)}
  division, paths, taus = folds.Division(3, {"layout:xla:random": fold_of}), [], []
  for fold in range(3):
    tested = [name for name in labels if fold_of[f"{splits[name]}/{name}"] == fold]
    ranked = {
      name: np.argsort(labels[name]) if fold == 0 else rng.permutation(8) for name in tested
    }
    paths.append(folder / f"fold={fold}" / "results.csv")
    paths[-1].parent.mkdir(parents=True)
    division.write(paths[-1].parent / folds.FILE, fold)
    submission.write_results(paths[-1], "layout:xla:random", ranked)
    found = [stats.kendalltau(np.argsort(ranked[name]), labels[name]) for name in tested]
    taus.append(np.mean([result.statistic for result in found]))
  return paths, taus


def test_test_folds_are_scored_alone_and_together(tmp_path, capsys):
  paths, taus = _write_folds(tmp_path / "npz", tmp_path)
  found = submission.score_folds(paths, tmp_path / "npz")["layout:xla:random"]
  assert found == [(pytest.approx(tau), 3, []) for tau in taus] and taus[0] == pytest.approx(1)
  arguments = ["score", *map(str, paths), "--data_root", str(tmp_path / "npz")]
  assert submission.main(arguments) == 0
  said = capsys.readouterr().out
  assert f"{np.mean(taus):.4f} ± {np.std(taus, ddof=1):.4f}  of 3 test folds, 9 graphs" in said
  assert submission.main(["score", str(paths[0]), "--data_root", str(tmp_path / "npz")]) == 0
  assert "1.0000  Kendall tau" in capsys.readouterr().out


def test_files_of_other_folds_or_of_none_are_not_scored_together(tmp_path):
  paths, _ = _write_folds(tmp_path / "npz", tmp_path)
  with pytest.raises(ValueError, match="already in"):
    submission.score_folds([paths[0], paths[1], paths[0]], tmp_path / "npz")
  kept = paths[2].with_name(folds.FILE)
  kept.write_text(kept.read_text().replace('net8": 2', 'net8": 1'))
  with pytest.raises(ValueError, match="other folds"):
    submission.score_folds(paths, tmp_path / "npz")
  kept.unlink()
  with pytest.raises(ValueError, match="no folds"):
    submission.score_folds(paths, tmp_path / "npz")


@pytest.mark.parametrize(
  "content", ["1;", "1", ";", ",", '"', "é", "1;" * 1000 + "\n", "layout:xla:random:g,0\n"]
)
def test_reading_a_file_takes_four_times_its_bytes_at_most(tmp_path, content):
  start = "ID,TopConfigs\nlayout:xla:random:g,"
  text = start + content * ((1 << 23) // len(content.encode()))
  path = tmp_path / "s.csv"
  path.write_text(text, encoding="utf-8")
  size = path.stat().st_size
  del text
  comparing.assert_reading_takes(4, size, lambda: submission.read_results(path))
