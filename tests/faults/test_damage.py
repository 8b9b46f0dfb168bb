"""Damaged files, and files that somebody sends, are read or end in one line, never in silence."""

import collections
import json
import shutil
import zipfile

import jax
import numpy as np
import pytest

from tests.support import commands, faults
from tpugraphs_jax import hlo, report, submission, synthetic
from tpugraphs_jax.data import graph_folder, npz
from tpugraphs_jax.hlo import tuning_data
from tpugraphs_jax.infra import files
from tpugraphs_jax.rankers import model_file, ranker
from tpugraphs_jax.train import checkpoint
from tpugraphs_jax.tuning import label_file

_HLO = commands.ROOT / "tests/data/hlo"
_COLLECTION = "layout:xla:random"


@pytest.fixture(name="place", scope="module")
def _place(data_root, tmp_path_factory):
  """A finished run (`workdir`), one of the same config on other data (`other`), a store."""
  folder = tmp_path_factory.mktemp("damage")
  second = synthetic.generate(folder / "data", collections=[_COLLECTION], seed=1, progress=False)
  for name, root in (("workdir", data_root), ("other", second)):
    command = ["run_layout.py", "--config=configs/layout.py:xla-random,full,ci", *faults.SHORT]
    command += [f"--data_root={root}", f"--workdir={folder / name}"]
    command += [f"--config.data.store_dir={folder / name}_store"]
    ended = faults.run(command, folder / "home")
    assert ended.code == 0, ended.err
  return folder


def _graph(folder):
  """The arrays of a graph in the store."""
  graph = graph_folder.read(folder)
  configs = {name: np.asarray(value) for name, value in vars(graph.configs).items()}
  return {name: value for name, value in vars(graph).items() if name != "configs"}, configs


def _model(path):
  """Config, transforms and parameters of a working folder or model file."""
  found = model_file.read(path)
  transforms = {name: value.to_dict() for name, value in found.transforms.items()}
  return found.config, transforms, found.params


def _same(read, expected):
  def check():
    found, structure = jax.tree.flatten(read())
    values, expected_structure = expected
    if structure != expected_structure or not all(map(np.array_equal, found, values)):
      raise AssertionError("another result in silence")

  return check


def _cases(place):
  """What is damaged: its files, its reader, and how often each random damage is tried."""
  workdir, (meta, *_) = place / "workdir", sorted(place.glob("workdir_store/**/meta.json"))
  checkpoint = [path for path in (workdir / "checkpoints").rglob("*") if path.is_file()]
  config = [workdir / model_file.CONFIG_FILE, workdir / model_file.TRANSFORMS_FILE]
  model = workdir / model_file.MODEL_FILE
  return {
    "config and transforms": (config, lambda: _model(workdir), 10),
    "checkpoint": (checkpoint, lambda: _model(workdir), 1),
    "model": ([model], lambda: _model(model), 50),
    "graph of the store": (list(meta.parent.iterdir()), lambda: _graph(meta.parent), 10),
  }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
  "what", ["config and transforms", "checkpoint", "model", "graph of the store"]
)
def test_a_damaged_file_is_refused_in_one_line_or_changes_nothing(what, place):
  paths, read, times = _cases(place)[what]
  expected, rng = jax.tree.flatten(read()), np.random.default_rng(0)
  for path in sorted(paths):
    whole = path.read_bytes()
    for kind in faults.DAMAGES:
      for _ in range(times if kind in ("flipped", "cut", "zeroed") else 1):
        path.unlink() if kind == "missing" else path.write_bytes(faults.damaged(whole, kind, rng))
        assert faults.outcome(_same(read, expected)) in ("read", "refused"), (path.name, kind)
        path.write_bytes(whole)


_FILES = (
  model_file.CONFIG_FILE,
  model_file.TRANSFORMS_FILE,
  model_file.MODEL_FILE,
  checkpoint.FOLDER,
)


@pytest.mark.parametrize("name", _FILES)
def test_a_file_of_another_run_of_the_config_is_never_read_in_silence(name, place, tmp_path):
  shutil.copytree(place / "workdir", tmp_path / "run")
  read = lambda: _model(tmp_path / "run")[1:]  # the config names the data; scores ignore it
  expected, original = jax.tree.flatten(read()), tmp_path / "run" / name
  if original.is_dir():
    shutil.rmtree(original)
    shutil.copytree(place / "other" / name, original)
  else:
    shutil.copyfile(place / "other" / name, original)
  assert faults.outcome(_same(read, expected)) in ("read", "refused")


@pytest.mark.parametrize(
  "source, read",
  [
    ("tile/xla/train", npz.read_tile),
    ("layout/xla/random/train", npz.read_layout),
    ("results.csv", submission.read_results),
    ("model.npz", model_file.read_file),
    (_HLO / "fuzz06.hlo.pb", lambda path: hlo.featurize(path.read_bytes())),
    (_HLO / "synth_layout_tuning.pb", tuning_data.read_tuning),
    (_HLO / "synth_op_tuning.pb", tuning_data.read_tuning),
  ],
  ids=str,
)
def test_a_mutated_input_is_read_or_refused_in_one_line(source, read, place, data_root, tmp_path):
  source = next(at for at in (place / "workdir" / source, data_root / source) if at.exists())
  source = sorted(source.glob("*.npz"))[0] if source.is_dir() else source
  rng, target = np.random.default_rng(0), tmp_path / f"mutated{source.suffix}"
  for number in range(40):
    faults.write_mutated(source, target, rng)
    assert faults.outcome(lambda: read(target)) in ("read", "refused"), number


@pytest.mark.parametrize("name", ["", *sorted(p.stem for p in model_file.SHIPPED.glob("*.npz"))])
def test_a_model_with_right_checksums_and_wrong_content_ranks_or_is_refused(
  name, place, data_root, tmp_path
):
  source = model_file.SHIPPED / f"{name}.npz" if name else place / "workdir" / model_file.MODEL_FILE
  rng, target = np.random.default_rng(len(name)), tmp_path / "sent.npz"
  graph = npz.read_layout(npz.split_files(data_root, _COLLECTION, "valid")[0])
  graph = type(graph)(**vars(graph) | {"configs": graph.configs.subset(np.arange(2))})
  with np.load(source) as file:
    arrays = dict(file)
  card = json.loads(arrays.pop("card").tobytes())
  for number in range(5):
    params = arrays if number % 3 else faults.changed_arrays(arrays, rng)
    sent = faults.changed(card, rng) if number % 3 else card
    if isinstance(sent.get("checksum"), str):
      sent = sent | {"checksum": model_file._checksum(params)}
    np.savez(target, card=np.frombuffer(json.dumps(sent).encode(), np.uint8), **params)
    result = faults.outcome(lambda: ranker.Ranker.load(target).rank(graph), names=target.name)
    assert result in ("read", "refused"), (number, result)


@pytest.mark.parametrize(
  "name", ["config.json", "summary.json", "metrics.jsonl", "validation_scores.npz"]
)
def test_a_working_folder_with_a_wrong_file_is_shown_or_refused_by_name(name, place, tmp_path):
  rng = np.random.default_rng(0)
  shutil.copytree(place / "workdir", tmp_path / "run")
  for number in range(4):
    _change(place / "workdir" / name, tmp_path / "run" / name, rng)
    read = lambda: report.write([tmp_path / "run"], tmp_path / "page.html")
    result = faults.outcome(read, names=name)
    assert result in ("read", "refused"), (number, result)


def _change(source, target, rng):
  if source.suffix == ".npz":
    with np.load(source) as file:
      np.savez(target, **faults.changed_arrays(dict(file), rng))
  elif rng.random() < 0.2:
    target.write_bytes(faults.damaged(source.read_bytes(), "flipped", rng))
  elif source.suffix == ".json":
    values = faults.changed(json.loads(source.read_text()), rng)
    target.write_text(json.dumps(files.seal(values) if "checksum" in values else values))
  else:
    lines = source.read_text().splitlines()
    at = int(rng.integers(len(lines) - 1))  # the last one may be cut short
    lines[at] = json.dumps(faults.changed([json.loads(lines[at])], rng)[:1] or [3])[1:-1]
    target.write_text("\n".join(lines) + "\n")


def test_a_graph_file_with_a_wrong_array_name_or_archive_is_refused(data_root, tmp_path):
  rng, names = np.random.default_rng(0), ("=g", "g,h", "g\x1b[2J", "g:h", "g")
  with np.load(npz.split_files(data_root, _COLLECTION, "valid")[0]) as file:
    arrays = dict(file)
  for number in range(40):
    path = tmp_path / f"{names[number % len(names)]}.npz"
    np.savez(path, **faults.changed_arrays(arrays, rng))
    with zipfile.ZipFile(path) as archive:
      members = {name: archive.read(name) for name in archive.namelist()}
    method = (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED)[number % 3]
    with zipfile.ZipFile(path, "w", method) as archive:
      for member, data in members.items():
        archive.writestr(member, data)
    is_wrong = path.stem != "g" or method != zipfile.ZIP_DEFLATED
    result = faults.outcome(lambda: npz.read_layout(path), names="npz")
    assert result == "refused" or (result == "read" and not is_wrong), (number, result)


def test_a_damaged_file_of_labels_never_gives_another_label(tmp_path):
  rng, path = np.random.default_rng(0), tmp_path / "labels.jsonl"
  key = {"label": "measured", "program": "a"}
  for number in range(20):
    label_file.append(path, {**key, "numbers": [number]})
    label_file.append(path, {**key, "numbers": [number], "raw": {"seconds": [rng.random()]}})
  whole, records = path.read_bytes(), label_file.records(path)
  found = collections.Counter()

  def read():
    read_records = label_file.records(path)
    assert read_records == records[: len(read_records)]

  for number in range(400):
    path.write_bytes(faults.damaged(whole, ("flipped", "cut")[number % 2], rng))
    found[faults.outcome(read, names=path.name)] += 1
  assert set(found) == {"read", "refused"}, found
