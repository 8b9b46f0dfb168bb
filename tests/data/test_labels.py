"""Every collection says of which kind its labels are."""

import json

import commands
import pytest

from tpugraphs_jax.collections import Collection
from tpugraphs_jax.data import labels, synthetic

OWN = Collection("layout:own:programs")


def note(folder, **fields):
  place = folder / "layout/own/programs/train"
  place.mkdir(parents=True)
  (place / "a.json").write_text(json.dumps(fields))


def test_synthetic_data_say_so(tmp_path):
  root = synthetic.generate(tmp_path, collections=["tile:xla"], limit=1, progress=False)
  assert labels.kind_of(str(root), Collection("tile:xla")).startswith("SYNTHETIC")


def test_released_collections_are_measured(tmp_path):
  assert labels.kind_of(str(tmp_path), Collection("layout:nlp:random")) == labels.MEASURED


@pytest.mark.parametrize("fields, words", [
    (dict(label="tpu_estimate", target="tpu:v3", libtpu="0.1"),
     ("ESTIMATE", "tpu:v3", "0.1", "no measurement")),
    (dict(label="measured", target="cpu"), ("measured", "cpu")),
    ({}, ("unknown",)),
])
def test_own_collections_say_which_compiler_or_machine(tmp_path, fields, words):
  note(tmp_path, **fields)
  found = labels.kind_of(str(tmp_path), OWN)
  assert all(word in found for word in words)


def test_own_collections_without_notes_are_of_unknown_kind(tmp_path):
  assert labels.kind_of(str(tmp_path), OWN) == labels.UNKNOWN


def test_the_programs_of_the_repository_are_estimates():
  assert "ESTIMATE" in labels.kind_of(str(commands.ROOT / "data/own/npz"), OWN)
