"""Names of released and own collections, their use, and their kinds of labels."""

import json
import shutil

import pytest

from tests.support import parts
from tpugraphs_jax import datasets, submission
from tpugraphs_jax.data import npz, store
from tpugraphs_jax.datasets import Collection
from tpugraphs_jax.train import training

MINE = Collection("layout:own:programs")
OWN = {"tile": "tile:own:my_kernels", "layout": "layout:own:my-programs.2"}


@pytest.mark.parametrize(
  "name",
  [
    "",
    "tile",
    "tile:nlp",
    "layout:xla",
    "layout:own",
    "layout:own:",
    "layout:own:a:b",
    "own:layout:a",
    "layout:own:../a",
    "layout:own:.hidden",
    "layout:own:a b",
    "tile:own:é",
  ],
)
def test_other_names_are_refused(name):
  with pytest.raises(ValueError, match="collection"):
    Collection(name)


@pytest.fixture(scope="module")
def data_root(data_root, tmp_path_factory):
  """The synthetic collections, also as own ones."""
  root = shutil.copytree(data_root, tmp_path_factory.mktemp("data") / "npz")
  for kind, released in (("tile", "tile/xla"), ("layout", "layout/xla/random")):
    shutil.copytree(root / released, root.joinpath(*OWN[kind].split(":")))
  return root


def test_own_kernels_are_read_trained_ranked_and_judged(data_root, tmp_path):
  """`tests/docs` does so with programs."""
  fields = parts.TINY | {"model.hidden_dim": 4, "batch.slates_per_epoch": 4}
  variant = f"own-my_kernels,{parts.VARIANTS['tile']}"
  training.run(parts.config_of("tile", variant, data_root=str(data_root), **fields), tmp_path)
  results = (tmp_path / "results.csv").read_text().splitlines()
  files = npz.split_files(data_root, OWN["tile"], "test")
  assert [line.split(",")[0] for line in results[1:]] == [
    f"{OWN['tile']}:{path.stem}" for path in files
  ]
  assert len((tmp_path / "validation.csv").read_text().splitlines()) == 1 + len(
    npz.split_files(data_root, OWN["tile"], "valid")
  )
  # Results are there, but they are no part of a submission.
  with pytest.raises(ValueError, match="tile:xla"):
    submission.read_results(tmp_path / "results.csv")


def test_the_store_lists_own_collections(data_root, capsys):
  assert store.main(["build", "--data_root", str(data_root)]) == 0
  printed = capsys.readouterr().out
  assert all(
    f"{name} {split}:" in printed
    for name in (OWN["layout"], "layout:xla:random")
    for split in ("train", "valid", "test")
  )
  with pytest.raises(ValueError, match="no store"):
    store.graph_folders(data_root, OWN["tile"], "train")


def note(folder, name, text):
  place = folder / "layout/own/programs/train"
  place.mkdir(parents=True)
  (place / name).write_text(text)


def test_copies_of_synthetic_data_say_so(data_root):
  assert datasets.label_kind(str(data_root), Collection("tile:xla")).startswith("SYNTHETIC")


def test_released_collections_are_measured(tmp_path):
  kind = datasets.label_kind(str(tmp_path), Collection("layout:nlp:random"))
  assert kind == datasets.MEASURED


@pytest.mark.parametrize(
  "fields, words",
  [
    (
      dict(label="tpu_estimate", target="tpu:v3", libtpu="0.1"),
      ("ESTIMATE", "tpu:v3", "0.1", "no measurement"),
    ),
    (dict(label="measured", target="cpu"), ("measured", "cpu")),
    (dict(label="measured", about={"machine": "a machine"}), ("measured", "a machine")),
    ({}, ("unknown",)),
  ],
)
def test_own_collections_say_which_compiler_or_machine(tmp_path, fields, words):
  note(tmp_path, "a.jsonl", "[]\n" + json.dumps(fields))
  found = datasets.label_kind(str(tmp_path), MINE)
  assert all(word in found for word in words)


@pytest.mark.parametrize("text", ["[1]", "3", "{"])
def test_other_json_beside_the_graphs_is_no_note_about_labels(tmp_path, text):
  note(tmp_path, "a.jsonl", text)
  assert datasets.label_kind(str(tmp_path), MINE) == datasets.UNKNOWN
