"""The random-access store: lossless, resumable, and never stale or half written."""

from __future__ import annotations

import codecs
import concurrent.futures
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from tests.support import commands, comparing, random_graphs, recorded
from tpugraphs_jax import graph
from tpugraphs_jax.data import graph_folder, npz, store

_COLLECTION = "layout:nlp:random"
_STORED = (
  "config_node edge_index group_row node_feat node_group node_opcode node_splits rows labels"
).split()


def _layout_graph(seed=0, *, configs=30, config_nodes=12, rows=9):
  rng = np.random.default_rng(seed)
  sizes = dict(nodes=40, edges=80, configs=configs, rows=rows, features=140)
  chosen = rng.permutation(40)[:config_nodes]
  return random_graphs.layout_graph(rng, config_nodes=chosen, name=f"g{seed}", **sizes)


def _write_split(root, *, count=3, split="valid", **options):
  folder = root / "layout" / "nlp" / "random" / split
  for seed in range(count):
    npz.write_layout(folder / f"g{seed}.npz", _layout_graph(seed, **options))
  return folder


def _ensure(root, **options):
  options = {"workers": 1} | options
  return store.ensure_store(root, _COLLECTION, "valid", **options)


def _built_at(folder):
  """A number that changes whenever a graph is built again."""
  return (folder / "group_row.npy").stat().st_ino


# What is stored


def test_stored_graph_equals_its_file(tmp_path):
  source = _write_split(tmp_path)
  expected, folders = list(map(npz.read_layout, sorted(source.iterdir()))), _ensure(tmp_path)
  assert [folder.name for folder in folders] == ["g0", "g1", "g2"]
  assert {path.stem for path in folders[0].glob("*.npy")} == set(_STORED)
  shutil.rmtree(source)  # opening must not read it
  for graph_there, folder in zip(expected, folders, strict=True):
    comparing.assert_same_graph(graph_folder.read(folder), graph_there)


def test_times_of_kernels_are_stored_and_their_loss_is_noticed(tmp_path):
  source = _write_split(tmp_path, count=2)
  plain = npz.read_layout(source / "g0.npz")
  runtime = np.random.default_rng(0).integers(0, 2**40, (len(plain.configs), 2))
  kernels = graph.KernelTimes(runtime, np.array([[0, 3], [1, 2], [1, 3]], np.int32))
  configs = dataclasses.replace(plain.configs, kernels=kernels)
  npz.write_layout(source / "g0.npz", dataclasses.replace(plain, configs=configs))
  folders = _ensure(tmp_path)
  stored, without = map(graph_folder.read, folders)
  np.testing.assert_array_equal(stored.configs.kernels.runtime, runtime)
  np.testing.assert_array_equal(stored.configs.kernels.node, kernels.node)
  assert without.configs.kernels is None
  (folders[0] / "kernel_node.npy").unlink()
  with pytest.raises(ValueError, match="kernel_node.npy is missing or damaged"):
    graph_folder.read(folders[0])


@contextlib.contextmanager
def _limited(kind, largest):
  """Sets a limit of this process, such as the size of a file, as a full disk would."""
  before, most = resource.getrlimit(kind)
  resource.setrlimit(kind, (largest, most))
  try:
    yield
  finally:
    resource.setrlimit(kind, (before, most))


def test_small_graphs_take_no_open_file_each(tmp_path):
  _write_split(tmp_path)
  with _limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 30):
    folders = _ensure(tmp_path)
    opened = [graph_folder.read(folders[number % 3]) for number in range(90)]
  assert not isinstance(opened[0].configs.group_row, np.memmap)


@recorded.needs_npz
@pytest.mark.parametrize("split", graph.SPLITS)
def test_released_configurations_survive_bit_for_bit(split, tmp_path):
  collection = "layout:xla:default"
  folders = store.ensure_store(recorded.NPZ, collection, split, store_dir=tmp_path, workers=1)
  files = npz.split_files(recorded.NPZ, collection, split)
  assert [folder.name for folder in folders] == [file.stem for file in files]
  for folder, file in zip(folders, files):
    configs = graph_folder.read(folder).configs
    with np.load(file) as released:
      decoded = configs.decode(np.arange(len(configs)))
      assert decoded.tobytes() == released["node_config_feat"].tobytes()
      assert configs.labels.tobytes() == released["config_runtime"].tobytes()


@pytest.mark.parametrize(
  "options, dtype",
  [
    ({"configs": 1}, np.uint8),
    ({"rows": 1}, np.uint8),
    ({"config_nodes": 1}, np.uint8),
    ({"rows": 2000, "configs": 500}, np.uint16),
  ],
  ids=["one-config", "equal-configs", "one-node", "many-rows"],
)
def test_extremes_are_stored_without_loss(tmp_path, options, dtype):
  folder = _write_split(tmp_path, count=1, **options)
  stored = graph_folder.read(_ensure(tmp_path)[0])
  comparing.assert_same_graph(stored, npz.read_layout(folder / "g0.npz"))
  assert stored.configs.group_row.dtype == dtype


def test_runtimes_and_unlabelled_graphs_are_stored_exactly(tmp_path):
  folder = tmp_path / "layout" / "nlp" / "random" / "valid"
  for name, labels in (("a", np.arange(30) + 2**62), ("b", np.zeros(30, np.int64))):
    op_graph = random_graphs.with_configs(_layout_graph(), labels=labels)
    npz.write_layout(folder / f"{name}.npz", op_graph)
  labelled, unlabelled = map(graph_folder.read, _ensure(tmp_path))
  np.testing.assert_array_equal(labelled.configs.labels, np.arange(30) + 2**62)
  assert labelled.configs.is_labelled and not unlabelled.configs.is_labelled


def test_store_moves_with_its_data(tmp_path):
  _write_split(tmp_path / "old", count=1)
  folder = _ensure(tmp_path / "old")[0].relative_to(tmp_path / "old")
  os.rename(tmp_path / "old", tmp_path / "new")
  graph_folder.read(tmp_path / "new" / folder)
  before = _built_at(tmp_path / "new" / folder)
  assert _built_at(_ensure(tmp_path / "new")[0]) == before


def test_store_dir_holds_the_store_and_nothing_goes_into_the_data(tmp_path):
  _write_split(tmp_path / "data")
  before = sorted((tmp_path / "data").rglob("*"))
  for folder in _ensure(tmp_path / "data", store_dir=tmp_path / "elsewhere"):
    assert folder.parent == tmp_path / "elsewhere" / "layout" / "nlp" / "random" / "valid"
  assert sorted((tmp_path / "data").rglob("*")) == before


# Building again


def test_finished_graphs_are_not_built_again(tmp_path):
  source = _write_split(tmp_path, count=2)
  before = [_built_at(folder) for folder in _ensure(tmp_path)]
  npz.write_layout(source / "g9.npz", _layout_graph(9))
  after = _ensure(tmp_path)
  assert [_built_at(folder) for folder in after[:2]] == before
  assert after[2].name == "g9"


def test_touched_source_is_recognised_by_its_contents(tmp_path):
  source = _write_split(tmp_path, count=1) / "g0.npz"
  folder = _ensure(tmp_path)[0]
  before = _built_at(folder)
  os.utime(source, ns=(1, 1))
  graph_folder.read(folder)
  assert _built_at(_ensure(tmp_path)[0]) == before


@pytest.mark.parametrize(
  "change",
  [lambda data: data[:-1], lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]],
  ids=["another size", "the same size"],
)
def test_changed_source_is_refused_on_opening(tmp_path, change):
  source = _write_split(tmp_path, count=1) / "g0.npz"
  folder = _ensure(tmp_path)[0]
  source.write_bytes(change(source.read_bytes()))
  os.utime(source, ns=(1, 1))
  with pytest.raises(ValueError, match="changed"):
    graph_folder.read(folder)


def _damage(path, damage):
  """Changes an array within its range, or cuts or removes its file."""
  if damage == "missing":
    path.unlink()
  elif damage == "changed":
    array = np.load(path)
    array.flat[-1] = array.flat[-1] - 1 if array.flat[-1] > 0 else array.flat[-1] + 1
    np.save(path, array)
  else:
    os.truncate(path, 0 if damage == "empty" else path.stat().st_size - 1)


@pytest.mark.parametrize(
  "name, damage",
  [
    *((name, "changed") for name in _STORED),
    *(("rows", damage) for damage in ("missing", "empty", "cut")),
  ],
)
def test_each_damaged_file_is_noticed_and_rebuilt(tmp_path, name, damage, caplog):
  source = _write_split(tmp_path, count=2) / "g0.npz"
  folder = _ensure(tmp_path)[0]
  _damage(folder / f"{name}.npy", damage)
  with pytest.raises(ValueError, match=name) as error:
    graph_folder.read(folder)
  assert "\n" not in str(error.value)
  caplog.clear()
  comparing.assert_same_graph(graph_folder.read(_ensure(tmp_path)[0]), npz.read_layout(source))
  (told,) = caplog.messages
  assert name in told and f"built again, in {folder.parent}" in told and "\n" not in told


def test_a_graph_in_the_place_of_another_one_is_noticed_and_rebuilt(tmp_path):
  _write_split(tmp_path, count=2)
  first, second = _ensure(tmp_path)
  shutil.rmtree(second)
  shutil.copytree(first, second)
  with pytest.raises(ValueError, match="another"):
    graph_folder.read(second)
  assert graph_folder.read(_ensure(tmp_path)[1]).name == "g1"


@pytest.mark.parametrize(
  "text, complaint",
  [
    *(
      (text, "meta.json")
      for text in (
        "",
        "{",
        "[]",
        "{}",
        '{"version": 3}',
        '{"version":3,"name":"g0","sha256":{}}',
        "\x00\x01",
      )
    ),
    ('{"version": 1}', "format 1, expected 3"),
    (None, "format 99, expected 3"),
  ],
)
def test_damaged_meta_and_other_formats_are_refused_and_rebuilt(tmp_path, text, complaint):
  _write_split(tmp_path, count=1)
  path = _ensure(tmp_path)[0] / "meta.json"
  path.write_text(
    json.dumps(json.loads(path.read_text()) | {"version": 99}) if text is None else text
  )
  with pytest.raises(ValueError, match=complaint):
    graph_folder.read(path.parent)
  graph_folder.read(_ensure(tmp_path)[0])


# Interruption


_MANY = """
import sys, time
from tpugraphs_jax.data import npz, store
if __name__ == "__main__":
  store.ensure_store(sys.argv[1], "layout:nlp:random", "valid", workers=2)
"""


def _children(pid):
  listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
  return [int(line) for line in listed.split()]


@pytest.mark.skipif(not shutil.which("pgrep"), reason="no pgrep here")
def test_the_processes_of_a_killed_builder_end_with_it(tmp_path):
  os.mkfifo(_write_split(tmp_path, count=2) / "g9.npz")  # a pipe, whose reader waits for ever
  script = tmp_path / "build.py"
  script.write_text(_MANY)
  builder = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
  try:
    # Two workers and the resource tracker.
    commands.wait_until(lambda: len(_children(builder.pid)) >= 3)
    children = _children(builder.pid)
  finally:
    builder.kill()
    builder.wait()
  commands.wait_until(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))


def test_failed_write_leaves_the_earlier_graph(tmp_path):
  source = _write_split(tmp_path, count=1) / "g0.npz"
  folder = _ensure(tmp_path)[0]
  kept = {path.name: path.read_bytes() for path in folder.iterdir()}
  npz.write_layout(source, _layout_graph(5))
  with _limited(resource.RLIMIT_FSIZE, 20_000), pytest.raises(OSError):
    _ensure(tmp_path)
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
  assert len(graph_folder.read(_ensure(tmp_path)[0]).configs) == 30


_KILLED_BUILD = """
import os, signal, sys
from tpugraphs_jax.data import graph_folder, store
write, built = graph_folder.write, []
def write_two(*args, **options):
  if len(built) == 2:
    os.makedirs(args[0].with_name(f".{args[0].name}.1.partial"))
    os.kill(os.getpid(), signal.SIGKILL)
  built.append(write(*args, **options))
graph_folder.write = write_two
store.ensure_store(sys.argv[1], "layout:nlp:random", "valid", workers=1)
"""


def test_killed_build_keeps_what_was_finished_and_is_resumed(tmp_path):
  _write_split(tmp_path, count=4)
  result = commands.python("-c", _KILLED_BUILD, tmp_path, timeout=300)
  assert result.returncode == -signal.SIGKILL
  split = tmp_path / "store" / "layout" / "nlp" / "random" / "valid"
  finished = {path.name: _built_at(path) for path in split.glob("g*")}
  assert len(finished) == 2
  folders = _ensure(tmp_path)
  assert len(folders) == 4
  assert {folder.name: _built_at(folder) for folder in folders}.items() >= finished.items()
  assert not list(split.glob(".*.partial"))


def test_several_processes_build_the_same_store(tmp_path):
  _write_split(tmp_path, count=3)
  built = _ensure(tmp_path, store_dir=tmp_path / "one")
  many = _ensure(tmp_path, store_dir=tmp_path / "many", workers=2)
  for a, b in zip(built, many, strict=True):
    for name in _STORED:
      assert (a / f"{name}.npy").read_bytes() == (b / f"{name}.npy").read_bytes()


def test_builders_at_the_same_time_build_each_graph_once(tmp_path):
  _write_split(tmp_path, count=4)
  build = lambda _: {folder.name: _built_at(folder) for folder in _ensure(tmp_path)}
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(build, range(4)))
  assert set(results[0]) == {"g0", "g1", "g2", "g3"}
  assert all(result == results[0] for result in results)


# Bad files


@pytest.mark.parametrize("workers", [1, 2])
def test_malformed_file_stops_the_build_in_one_line(tmp_path, workers):
  split = _write_split(tmp_path)
  (split / "g1.npz").write_bytes(b"junk")
  with pytest.raises(npz.NpzError, match="g1.npz") as caught:
    _ensure(tmp_path, workers=workers)
  assert "\n" not in str(caught.value)


def test_malformed_file_can_be_skipped_by_name(tmp_path, caplog):
  split = _write_split(tmp_path)
  (split / "g1.npz").write_bytes(b"junk")
  folders = _ensure(tmp_path, skip_bad_files=True)
  assert [folder.name for folder in folders] == ["g0", "g2"]
  assert f"skipped {split / 'g1.npz'}" in caplog.text


# Files of another user


def _build_as_nobody(arguments, said):
  """Builds a store as a user without the rights of root."""
  codecs.lookup("cp437")  # names of archives, by a module that root may read
  commands.redirect(said, said)
  if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
  sys.exit(store.main(["build", "--workers", "1", *arguments]))


@pytest.fixture
def foreign():
  """A folder that the user may enter and read; tests take rights away from its parts."""
  folder = Path(tempfile.mkdtemp())  # `tmp_path` lies in a folder that nobody else may enter
  folder.chmod(0o755)
  _write_split(folder, count=2)
  yield folder
  for path in (folder, *folder.glob("**")):
    path.chmod(0o755)
  shutil.rmtree(folder)


@pytest.mark.parametrize(
  "taken, mode, message",
  [
    (
      "",
      0o555,
      "cannot write the store {}/store/layout/nlp/random/valid (Permission denied); name",
    ),
    ("layout/nlp/random/valid", 0, "{}/layout/nlp/random/valid: Permission denied: check"),
    ("layout/nlp", 0, "{}/layout/nlp/random/valid: Permission denied: check"),
    ("layout/nlp/random/valid/g1.npz", 0, "{}/layout/nlp/random/valid/g1.npz: Permission denied"),
    ("store/layout/nlp/random/valid", 0o555, "cannot write the store {}/store/layout/nlp/random"),
    ("store/layout/nlp/random/valid/g1", 0, "{}/store/layout/nlp/random/valid/g1"),
    ("store/layout/nlp/random/valid/g1/meta.json", 0, "g1/meta.json: Permission denied: check its"),
  ],
)
def test_a_store_of_another_user_is_told_in_one_line(foreign, tmp_path, taken, mode, message):
  if taken.startswith("store"):
    _ensure(foreign)
    npz.write_layout(foreign / "layout/nlp/random/valid/g0.npz", _layout_graph(7))
  elif taken:
    (foreign / "store").mkdir()
    (foreign / "store").chmod(0o777)
  (foreign / taken).chmod(mode)
  arguments = ["--data_root", str(foreign), "--collection", _COLLECTION, "--split", "valid"]
  said = tmp_path / "said"
  process = commands.server().Process(target=_build_as_nobody, args=(arguments, said))
  process.start()
  process.join()
  assert process.exitcode == 2
  (line,) = (line for line in said.read_text().splitlines() if line.startswith("error: "))
  assert message.format(foreign) in line


# Machines of a cluster


def _cluster(monkeypatch, takes):
  """Stands for Beam: tasks arrive by pickle and are done where `takes(file)`; returns the calls."""
  asked = []

  def run_on_beam(work, todo, *, processes, options):
    asked.append((len(todo), list(options)))
    for task in pickle.loads(pickle.dumps(todo)):
      if takes(task[0]):
        work(task)

  monkeypatch.setattr(store.tasks, "run_on_beam", run_on_beam)
  return asked


@pytest.mark.parametrize("takes", [lambda file: True, lambda file: file.stem == "g1"])
def test_a_cluster_builds_the_same_and_what_it_leaves_is_built_here(
  tmp_path, monkeypatch, takes, capsys
):
  _write_split(tmp_path, count=3)
  here = _ensure(tmp_path, store_dir=tmp_path / "here")
  asked = _cluster(monkeypatch, takes)
  options = ["--store_dir", str(tmp_path / "there"), "--", "--runner=X"]
  assert store.main(["build", "--data_root", str(tmp_path), *options]) == 0
  assert "3 of 3 graphs built" in capsys.readouterr().out
  assert asked == [(3, ["--runner=X"])]
  for folder in here:
    for path in folder.glob("*.npy"):
      built = tmp_path / "there" / folder.relative_to(tmp_path / "here") / path.name
      assert built.read_bytes() == path.read_bytes()
  assert store.main(["build", "--data_root", str(tmp_path), *options]) == 0
  assert asked == [(3, ["--runner=X"])]  # nothing was left to do


def test_a_store_replaces_no_folder_that_a_link_leads_to(tmp_path):
  (tmp_path / "home" / "g0").mkdir(parents=True)  # as a graph is named
  (tmp_path / "home" / "g0" / "thesis.tex").write_text("kept")
  _write_split(tmp_path / "sent")
  (tmp_path / "sent/store/layout/nlp/random").mkdir(parents=True)
  (tmp_path / "sent/store/layout/nlp/random/valid").symlink_to(tmp_path / "home")
  with pytest.raises(ValueError, match="a link to"):
    _ensure(tmp_path / "sent")
  assert (tmp_path / "home" / "g0" / "thesis.tex").read_text() == "kept"


def test_a_source_of_the_same_size_and_time_that_replaces_another_is_built(tmp_path):
  folder = _write_split(tmp_path, count=1)
  os.utime(folder / "g0.npz", (1, 1))
  (built,) = _ensure(tmp_path)
  before = graph_folder.read(built)
  with np.load(folder / "g0.npz") as archive:
    arrays = dict(archive)
  for scale in (1, 2):
    np.savez(folder / "g0.npz", **arrays | {"config_runtime": scale * arrays["config_runtime"]})
    os.utime(folder / "g0.npz", (1, 1))
    (built,) = _ensure(tmp_path)
    found = graph_folder.read(built).configs.labels
    np.testing.assert_array_equal(found, scale * before.configs.labels)
