"""The collections of own programs in the repository: contents, and that they can be made anew."""

import functools
import importlib.metadata

import jax
import numpy as np
import pytest

from tests.support import commands, recorded
from tools import label_own
from tpugraphs_jax import collect, columns, hlo
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import tpu
from tpugraphs_jax.tuning import choosing, label_file, programs

_OWN = commands.ROOT / "data" / "own" / "npz" / "layout" / "own"
_TILES = commands.ROOT / "data" / "own" / "npz" / "tile" / "own"
_OUTPUTS = sorted(_OWN.joinpath("outputs").glob("*/*.npz"))
_BLOCKS = sorted(_OWN.joinpath("blocks").glob("*/*.npz"))
# Labels of newer TPUs, by generation.
_NEWER = {target: sorted(_OWN.glob(f"*_{target}/*/*.npz")) for target in ("v5e", "v5p", "v6e")}
_MORE = set(_OWN.glob("more_v6e/*/*.npz"))  # without labels of TPU v3
_MEASURED = sorted(_OWN.joinpath("programs_cpu").glob("*/*.npz"))
_AGAIN = ("generated_train_perceptron_0", "generated_test_bilinear_0")  # compile in two seconds
_CONFIGS = 4


record_of = functools.cache(label_file.collected)


def families(paths):
  """Of each split, the files of `examples/programs` that its programs come from."""
  found = {}
  for path in paths:
    found.setdefault(path.parent.name, set()).add(record_of(path)["source"].split(":")[0])
  return found


@pytest.mark.parametrize(
  "paths, splits",
  [
    (_OUTPUTS, {"train", "valid", "test"}),
    (_BLOCKS, {"train", "test"}),
    (_MEASURED, {"train", "valid", "test"}),
    *((paths, {"train", "valid", "test"}) for paths in _NEWER.values()),
  ],
  ids=["outputs", "blocks", "measured", *_NEWER],
)
def test_no_program_has_a_sibling_in_another_split(paths, splits):
  found = families(paths)
  assert set(found) == splits
  assert len(set.union(*found.values())) == sum(map(len, found.values()))


@pytest.mark.parametrize("collection", sorted(_OWN.iterdir()), ids=lambda folder: folder.name)
def test_programs_have_their_labels_beside_them(collection):
  paths = sorted(collection.glob("*/*.npz"))
  assert paths
  for path in paths:
    graph, record = npz.read_layout(path), record_of(path)
    value = {
      "measured": lambda raw: round(min(raw["seconds"]) * 1e9),
      "tpu_estimate": lambda raw: round(raw["milliseconds"] * 1e9),
      "optimal_seconds": lambda raw: round(raw["optimal_seconds"] * 1e12),
      "estimated_cycles": lambda raw: raw["estimated_cycles"],
    }[record["label"]]
    assert graph.configs.labels.tolist() == list(map(value, record["configs"])), path
    assert not any(record["configs"][0]["numbers"]), path  # the compiler's own choice comes first
    assert graph.name == record["name"] == path.stem
    # Sources are relative to the repository.
    assert record["source"].startswith(("examples/programs/", "benchmarks/steps/")), path


@pytest.mark.parametrize("collection", sorted(_TILES.iterdir()), ids=lambda folder: folder.name)
def test_kernels_have_the_times_of_their_tiles_beside_them(collection):
  paths = sorted(collection.glob("*/*.npz"))
  assert len(paths) >= 60
  for path in paths:
    graph, lines = npz.read_tile(path), label_file.records(path.with_suffix(label_file.SUFFIX))
    timed = [line for line in lines if "raw" in line]
    microseconds = [1e3 * line["raw"]["milliseconds"] for line in timed]
    np.testing.assert_allclose(1e-3 * graph.configs.runtime_ns, microseconds, atol=6e-4)
    values = [list(line["tile"].values()) for line in timed]
    inputs = graph.configs.config_feat[:, columns.TILE["input_bounds"]]
    np.testing.assert_array_equal(inputs[:, : len(values[0])], values)
    about = lines[-1]["about"]
    assert (about["name"], about["split"]) == (path.stem, path.parent.name)
    assert lines[-1]["source"] == f"examples/kernels.py:{path.stem}"


def test_programs_are_labelled_anew_by_split_and_size():
  requests = label_own.requests("v6e", "out/own")
  files = [
    _OWN / request.collection.rpartition(":")[2] / request.split / f"{request.name}.npz"
    for request in requests
  ]
  collections = ("outputs", "blocks", "kept_out")
  of_v3 = {path for name in collections for path in _OWN.joinpath(name).glob("*/*.npz")}
  v3 = [
    path.parents[2] / path.parents[1].name.removesuffix("_v6e") / path.parent.name / path.name
    for path in files
  ]
  assert set(v3) == of_v3 and len(v3) == len(of_v3)
  assert set(files) >= set(_NEWER["v6e"]) - _MORE
  assert [request.split for request in requests] == sorted(
    (path.parent.name for path in files), key=["test", "valid", "train"].index
  )
  sizes = [len(npz.read_structure(path, "layout")[1]) for path in v3 if "test" in path.parts]
  assert sizes == sorted(sizes)
  assert all(request.source.startswith("examples/programs/") for request in requests)


def test_programs_without_labels_of_v3_are_labelled_too(monkeypatch):
  monkeypatch.chdir(commands.ROOT)
  known = {request.name for request in label_own.requests("v6e", "out/own")}
  with jax.numpy_rank_promotion("allow"):  # steps as people write them
    more = label_own.more_requests("v6e", "out/own", ["valid"])
  assert more and not known & {request.name for request in more}
  assert {path.stem for path in _MORE if "valid" in path.parts} <= {each.name for each in more}
  assert {(request.split, request.collection) for request in more} == {
    ("valid", "layout:own:more_v6e")
  }


@recorded.needs_libtpu
@pytest.mark.parametrize("name", _AGAIN)
def test_estimates_can_be_made_anew(name):
  (path,) = [path for path in _OUTPUTS if path.stem == name]
  record, shipped = record_of(path), npz.read_layout(path)
  versions = {"libtpu": importlib.metadata.version("libtpu"), "jax": jax.__version__}
  if versions != {name: record[name] for name in versions}:
    pytest.skip(f"made with libtpu {record['libtpu']} and jax {record['jax']}, here are {versions}")
  (program,) = programs.load(str(commands.ROOT / record["source"]))
  choices = collect.choices(program.function, *program.args)
  functions = [
    choosing.apply(program.function, choices.choice(row["numbers"]))
    for row in record["configs"][:_CONFIGS]
  ]
  for row, function in zip(record["configs"], functions):
    compiled = tpu.compile_function(function, program.args, record["target"])
    assert compiled.optimal_seconds == row["optimal_seconds"]
  graph = hlo.featurize(functions[0], *program.args, target="v3")
  for field in ("node_feat", "node_opcode", "edge_index", "config_node"):
    np.testing.assert_array_equal(getattr(graph, field), getattr(shipped, field), err_msg=field)
