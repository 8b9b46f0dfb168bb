"""What a file that somebody else has sent can do: nothing but be read or refused."""

import dataclasses
import errno
import json
import sys
import zipfile

import fsspec
import jax
import numpy as np
import pytest

from tests.support import commands, comparing, hlo_modules, random_graphs
import tpugraphs_jax
from tpugraphs_jax import datasets, hlo, submission
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo.__main__ import main
from tpugraphs_jax.infra import console, files, machine, trust
from tpugraphs_jax.rankers import model_file, ranker
from tpugraphs_jax.train import evaluation

SHIPPED = model_file.SHIPPED / "layout-cpu-measured.npz"
EVIL = "import pathlib\npathlib.Path({!r}).write_text('ran')\n"


def repacked(path, source=SHIPPED, *, changed=None, more=()):
  """A copy of a model file whose card was changed, with further members `(name, bytes)`."""
  with np.load(source) as file:
    arrays = dict(file)
  card = json.loads(arrays.pop("card").tobytes())
  if changed:
    changed(card)
  np.savez_compressed(path, card=np.frombuffer(json.dumps(card).encode(), np.uint8), **arrays)
  with zipfile.ZipFile(path, "a") as archive:
    for name, data in more:
      archive.writestr(name, data)
  return path


def extended(*names):
  return lambda card: card["config"].update(extensions=names)


def refused(read, *words):
  """The one line with which a reader refuses a file."""
  with pytest.raises((ValueError, OSError)) as error:
    read()
  line = str(error.value)
  assert "\n" not in line and all(word in line for word in words), line
  return line


# Code.


def test_a_model_file_runs_no_code_of_its_author(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code = EVIL.format(str(tmp_path / "ran"))
  (tmp_path / "evil_here.py").write_text(code)
  path = repacked("model.npz", changed=extended("evil_here"))
  refused(lambda: tpugraphs_jax.load(path), "evil_here", "extensions")
  repacked(path, changed=extended("evil"), more=[("evil.py", code), ("evil.py.npy", code)])
  refused(lambda: tpugraphs_jax.load(path))
  assert not (tmp_path / "ran").exists() and "evil_here" not in sys.modules


def test_only_a_module_that_the_caller_names_is_imported(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "named_here.py").write_text("IS_IMPORTED = True\n")
  path = repacked(tmp_path / "model.npz", changed=extended("named_here"))
  refused(lambda: tpugraphs_jax.load(path), "named_here")
  loaded = tpugraphs_jax.load(path, extensions=["named_here"])
  assert loaded.params is not None and sys.modules["named_here"].IS_IMPORTED
  assert tpugraphs_jax.load(path).family is loaded.family  # the module is known by now


def test_the_config_of_a_folder_imports_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "evil_config.py").write_text(EVIL.format(str(tmp_path / "ran")))
  with np.load(SHIPPED) as file:
    config = json.loads(file["card"].tobytes())["config"]
  (tmp_path / "config.json").write_text(
    json.dumps({"config": config | {"extensions": ["evil_config"]}})
  )
  repacked(tmp_path / "model.npz", changed=extended("evil_config"))
  found = model_file.config_of(tmp_path)
  assert found["extensions"] == ("evil_config",)
  refused(lambda: tpugraphs_jax.load(tmp_path), "evil_config")
  assert not (tmp_path / "ran").exists()


# Files.


@pytest.mark.parametrize("field", ["store_dir", "indices_dir"])
def test_no_place_of_a_file_is_read_or_written(field, tmp_path, monkeypatch):
  monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
  bomb = tmp_path / "x.npz"
  with zipfile.ZipFile(bomb, "w") as archive:
    archive.writestr("../../../written", "elsewhere")
  place, section = f"zip://::{bomb}", "eval" if field == "indices_dir" else "data"

  def with_places(card):
    card["config"][section][field] = card["config"]["data_root"] = place

  path = repacked(tmp_path / "model.npz", changed=with_places)
  config = tpugraphs_jax.load(path).config
  assert place not in json.dumps(config.to_dict())
  assert not (tmp_path / "cache").exists() and not list(tmp_path.rglob("written"))


@pytest.mark.parametrize("key", ["../../x", "a/../../x", "/tmp/trust_x", "..", "a/./../../../x"])
def test_a_key_of_a_bucket_stays_in_the_folder_of_its_copy(key, tmp_path, monkeypatch):
  monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
  with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
    archive.writestr("data/good", "1")
    archive.writestr(f"data/{key}", "2")
  refused(lambda: trust.inside(tmp_path, key), "outside")
  system = fsspec.filesystem("memory")
  listed = lambda self, root, detail: {
    f"{root}/{name}": {"name": f"{root}/{name}", "size": 1} for name in ("good", key)
  }
  monkeypatch.setattr(type(system), "find", listed)
  monkeypatch.setattr(type(system), "isfile", lambda self, path: False)
  for read in (
    lambda: files.fetch("memory://bucket/data"),
    lambda: files.working_folder("memory://bucket/data").__enter__(),
  ):
    refused(read, "outside")
  names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
  assert names <= {"x.zip", ".lock", ".lock.owner"}


# Memory.


def bombs(folder):
  """Archives of a few kB, each with an array of 64 MiB."""
  data = np.lib.format.magic(1, 0)
  dictionary = repr({"descr": "<f4", "fortran_order": False, "shape": (1 << 24,)}).ljust(117) + "\n"
  data += len(dictionary).to_bytes(2, "little") + dictionary.encode()
  for kind, method in (
    ("bzip2", zipfile.ZIP_BZIP2),
    ("lzma", zipfile.ZIP_LZMA),
    ("deflate", zipfile.ZIP_DEFLATED),
  ):
    path = folder / f"{kind}.npz"
    with (
      zipfile.ZipFile(path, "w", method) as archive,
      archive.open("node_feat.npy", "w") as member,
    ):
      member.write(data)
      member.write(bytes(1 << 26))
    yield path


def test_a_few_kilobytes_take_no_more_memory_than_there_is(tmp_path, monkeypatch):
  monkeypatch.setattr(machine, "available", lambda: 1 << 25)
  for path in bombs(tmp_path):

    def read():
      with npz.NpzArchive(path) as archive:
        archive.read("node_feat")

    refused(read, path.name, "memory" if path.stem == "deflate" else "compress")
    refused(lambda: model_file.read_file(path), path.name)


def test_a_model_file_has_a_largest_size(tmp_path, monkeypatch):
  monkeypatch.setattr(model_file, "MOST_BYTES", 1000)
  refused(lambda: model_file.read_file(SHIPPED), "1.00kB")


def test_a_name_twice_in_an_archive_is_refused(tmp_path):
  with pytest.warns(UserWarning, match="Duplicate"):
    path = repacked(tmp_path / "model.npz", more=[("card.npy", b"x")])
  refused(lambda: model_file.read_file(path), "twice")


def test_available_memory_is_that_of_the_tightest_limit(tmp_path, monkeypatch):
  files = {
    "meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n",
    "max": "40960\n",
    "current": "15360",
    "memory.stat": "anon 7\ninactive_file 4120\nactive_file 1000\n",
  }
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
  monkeypatch.setattr(machine, "_groups", lambda: [(tmp_path, "max", "current")])
  assert machine.available() == 30720
  (tmp_path / "max").write_text("max\n")
  assert machine.available() == 51200


# Names.


BAD_NAMES = [
  "=1+2",
  "+a",
  "-a",
  "@a",
  "a,b",
  "a:b",
  'a"b',
  "a\nb",
  "a\x1b[31mb",
  "a\x9bb",
  "a\u202eb",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_whose_name_is_a_command_elsewhere_is_refused_before_it_is_read(name, tmp_path):
  rng = np.random.default_rng(0)
  sizes = dict(nodes=3, edges=2, configs=4, features=140)
  tile = random_graphs.tile_graph(rng, **sizes, columns=24)
  layout = random_graphs.layout_graph(rng, **sizes, config_nodes=[0])
  for graph, write, read in (
    (tile, npz.write_tile, npz.read_tile),
    (layout, npz.write_layout, npz.read_layout),
  ):
    path = tmp_path / f"{name}.npz"
    write(path, graph)
    assert refused(lambda: read(path), "rename the file").isprintable()
    path.rename(tmp_path / "good $1.npz")
    assert read(tmp_path / "good $1.npz").name == "good $1"
  for make in (submission.graph_id, lambda *parts: submission.split_id(":".join(parts))):
    with pytest.raises(ValueError):
      make("tile:xla", name)


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_no_name_of_a_file_reaches_the_terminal_as_a_command(tmp_path, capsys):
  module = hlo_modules.module(
    hlo_modules.computation(
      hlo_modules.instruction("parameter", id=1, shape=[4, 6]),
      hlo_modules.instruction("reshape", id=2, operands=[1], shape=[24]),
    ),
    name=f"m{ESCAPE}",
  )
  for computation in module.computations:
    computation.name = f"c{ESCAPE}"
    for node in computation.instructions:
      node.name = f"n{ESCAPE}"
  (tmp_path / "m.pb").write_bytes(module.SerializeToString())
  assert main(["show", str(tmp_path / "m.pb")]) == 0
  (tmp_path / "s.csv").write_text(f"{submission.HEADER}\ntile:xla:a{ESCAPE},0;1;2;3;4\n")
  sizes = dict(nodes=3, edges=2, configs=6, features=140, columns=24)
  graph = random_graphs.tile_graph(np.random.default_rng(0), **sizes)
  npz.write_tile(tmp_path / "tile/xla/test/a.npz", graph)
  assert submission.main(["check", str(tmp_path / "s.csv"), "--data_root", str(tmp_path)]) in (1, 2)
  rows = [{"graph": f"g{ESCAPE}", "nodes": 3, "configs": 4, "kendaltau": 1.0, "slowdown1": 0.0}]
  console.say(
    evaluation.summary(
      datasets.Collection("layout:xla:random"), rows, {"kendaltau": 1.0}, random={"kendaltau": 0.0}
    )
  )
  told = "".join(capsys.readouterr())
  assert "owned" in told and all(c.isprintable() or c == "\n" for c in told)


# Text.


@pytest.mark.parametrize(
  "text",
  [
    "HloModule m\nENTRY e {\n ROOT r = f32[] add(" + "(" * 100_000 + ")\n}\n",
    "HloModule m\nENTRY e {\n ROOT p = f32[] parameter(1000000000)\n}\n",
    "HloModule m\nENTRY e {\n ROOT p = "
    + "(" * 100_000
    + "f32[]"
    + ")" * 100_000
    + " parameter(0)\n}\n",
  ],
)
def test_hlo_text_that_ends_its_parser_is_refused(text):
  refused(lambda: hlo.featurize(text), "HLO text")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"{", b""])
def test_every_reader_of_json_refuses_what_is_none(data, tmp_path):
  refused(lambda: trust.parse(data))


# Memory, of a process that may take little.


def test_a_reader_whose_memory_is_limited_says_so(tmp_path):
  path = tmp_path / "big.npz"
  np.savez(path, node_feat=np.zeros((1 << 20, 140), np.float32))
  script = (
    "import sys\nfrom tpugraphs_jax.infra import machine\n"
    "from tpugraphs_jax.data import npz\nmachine.limit(300 << 20)\n"
    "with npz.NpzArchive(sys.argv[1]) as a:\n  a.read('node_feat')\n"
  )
  ended = commands.python("-c", script, path)
  assert "of memory that are available" in ended.stderr.splitlines()[-1]


# One line for mistakes in Python.


GRAPH = "data/own/npz/layout/own/programs_cpu/test/experts_layer.npz"


def test_a_file_in_place_of_a_graph_and_a_graph_without_configurations_say_what_to_do():
  model, graph = tpugraphs_jax.load("layout-cpu-measured"), npz.read_layout(GRAPH)
  bare = dataclasses.replace(graph, configs=None)
  for call in (
    tpugraphs_jax.rank,
    lambda model, graph: model.scores([graph]),
    lambda model, graph: model.explain(graph, 1),
  ):
    refused(lambda: call(model, "kernel.npz"), "is a str, expected an OpGraph", "read_tile")
    refused(lambda: call(model, bare), "call graph.with_layouts(300)")
  refused(lambda: npz.read_tile(GRAPH), GRAPH, "read it with read_layout")


def test_a_model_can_be_saved_again(tmp_path):
  model = tpugraphs_jax.load("layout-cpu-measured")
  model.save(tmp_path / "again.npz")
  again = tpugraphs_jax.load(tmp_path / "again.npz")
  comparing.assert_same_trees(again.params, model.params)
  assert (again.config, again.about) == (model.config, model.about)
  for name, transform in model.transforms.items():
    comparing.assert_same_trees(again.transforms[name].to_dict(), transform.to_dict())
  with pytest.raises(ValueError, match="no parameters"):
    ranker.Ranker(model.config).save(tmp_path / "none.npz")


def test_showing_a_graph_file_says_what_reads_it(capsys):
  assert main(["show", GRAPH]) == 2
  assert "read_layout" in capsys.readouterr().err


@pytest.mark.parametrize(
  "error, said",
  [
    (OSError(errno.EROFS, "Read-only file system"), "Read-only file system: name a folder"),
    (OSError(errno.EROFS, "Read-only file system", "out/x"), "out/x: Read-only file system: name"),
    (
      PermissionError(errno.EACCES, "Permission denied", "out/x"),
      "out/x: Permission denied: check its permissions",
    ),
  ],
)
def test_an_error_of_the_system_is_told_without_its_number(error, said):
  assert console.one_line(error).startswith(said)
  assert "Errno" not in console.one_line(OSError(errno.ENOTDIR, "Not a directory", "x"))


# Transforms and shapes that are not those of the model.


def first_columns(change):
  def changed(card):
    for transform in card["transforms"].values():
      transform.update({name: change(name, values) for name, values in transform.items()})

  return changed


@pytest.mark.parametrize(
  "change",
  [
    lambda name, values: [-1, *values[1:]] if name == "kept" else values,
    lambda name, values: values[:-1],
    lambda name, values: values[:-1] if name == "log" else values,
    lambda name, values: [10**6, *values[1:]] if name == "kept" else values,
    lambda name, values: values[::-1] if name == "kept" else values,
    lambda name, values: [0] * len(values) if name == "scale" else values,
    lambda name, values: [values],
    lambda name, values: None,
    lambda name, values: "x",
    lambda name, values: [float("nan")] * len(values) if name == "offset" else values,
  ],
)
def test_transforms_that_are_not_those_of_the_model_are_refused(change, tmp_path):
  path = repacked(tmp_path / "model.npz", changed=first_columns(change))
  refused(lambda: tpugraphs_jax.load(path), str(path), "damaged")


@pytest.mark.parametrize(
  "changes",
  [
    {"model": {"hidden_dim": 16}},
    {"model": {"num_gnns": 10**9}},
    {"model": {"num_gnns": 1}},
    {"model": {"name": "Nope"}},
    {"model": {"name": 3}},
    {"model": []},
    {"data": {"features": 3}},
    {"data": {"features": ["released", "random_walk"]}},
    {"eval": {"configs": 10**12}},
    {"eval": {"graphs": -1}},
    {"task": "nope"},
    {"task": None},
    {"extensions": None},
    {"data": {"source": "../../x"}},
    {"data": {"pad_value": 7}},
    {"seed": "x"},
  ],
)
def test_a_config_that_is_not_that_of_the_model_is_refused(changes, tmp_path):
  def change(card):
    for section, values in changes.items():
      if isinstance(values, dict):
        card["config"][section].update(values)
      else:
        card["config"][section] = values

  path = repacked(tmp_path / "model.npz", changed=change)
  refused(lambda: tpugraphs_jax.load(path), str(path))


def test_parameters_of_another_shape_or_type_are_refused(tmp_path):
  artefact = model_file.read_file(SHIPPED)
  for change in (
    lambda leaf: leaf[..., None],
    lambda leaf: leaf.astype(np.float64),
    lambda leaf: leaf[:-1],
  ):
    params = jax.tree.map(change, artefact.params)
    model_file.write(tmp_path / "model.npz", dataclasses.replace(artefact, params=params))
    refused(lambda: tpugraphs_jax.load(tmp_path / "model.npz"), "model.npz", "damaged")


@pytest.mark.parametrize("part", ["[],", "{},", "0,", '"a",', '{"a":1},', "1.5,", "[[]],"])
def test_a_long_text_of_tiny_parts_is_no_json_of_this_package(monkeypatch, part):
  monkeypatch.setattr(trust, "_LONG_TEXT", 1 << 20)
  text = "[" + part * ((1 << 22) // len(part)) + "0]"
  for value in (text, text.encode()):
    comparing.assert_reading_takes(4, len(text), lambda value=value: trust.parse(value))


def test_a_long_text_as_this_package_writes_it_is_read(monkeypatch):
  monkeypatch.setattr(trust, "_LONG_TEXT", 1)
  records = (commands.ROOT / "benchmarks").glob("*.json")
  text = max(records, key=lambda path: path.stat().st_size).read_text()
  assert trust.parse(text) == json.loads(text)


def test_a_lack_of_memory_is_a_line_and_no_damage():
  with pytest.raises(ValueError, match="^x.npz: not enough memory"):
    with trust.reading("x.npz", "copy it again"):
      raise MemoryError
