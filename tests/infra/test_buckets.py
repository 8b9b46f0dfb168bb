"""Data and working folders in buckets: fetched, sent, and never lost."""

import importlib.util
import json
import shutil
import time

import fsspec
import numpy as np
import pytest

from tests.support import commands, parts
import tpugraphs_jax
from tpugraphs_jax import datasets, report, submission
from tpugraphs_jax.data import download, npz, store
from tpugraphs_jax.hlo.__main__ import main
from tpugraphs_jax.infra import files, machine
from tpugraphs_jax.run import official
from tpugraphs_jax.train import training


@pytest.fixture(scope="module")
def server():
  """Address of an object server on this machine."""
  moto = pytest.importorskip("moto.server", reason="no moto: pip install 'moto[server]' s3fs")
  pytest.importorskip("s3fs", reason="no s3fs: pip install s3fs")
  running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
  running.start()
  host, port = running.get_host_and_port()
  yield f"http://{host}:{port}"
  running.stop()


@pytest.fixture(params=["memory", "s3"])
def bucket(request, monkeypatch, tmp_path):
  """Address of an empty bucket; local copies go to a folder of the test."""
  monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)
  if request.param == "memory":
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket"
  else:
    for name, value in (
      ("AWS_ENDPOINT_URL", request.getfixturevalue("server")),
      ("AWS_ACCESS_KEY_ID", "test"),
      ("AWS_SECRET_ACCESS_KEY", "test"),
      ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
      monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3", skip_instance_cache=False)
    name = f"b{abs(hash(str(tmp_path)))}"
    system.mkdir(name)
    yield f"s3://{name}"
  assert not [path for path in tmp_path.iterdir() if ":" in path.name], "a folder like gs:"


def put(place, data):
  with fsspec.open(place, "wb") as file:
    file.write(data)


def names(place):
  system, root = fsspec.core.url_to_fs(place)
  system.invalidate_cache()
  return {path[len(root) + 1 :] for path in system.find(root)}


def text(place):
  with fsspec.open(place, "rb") as file:
    return file.read().decode()


def test_a_folder_is_copied_once_and_then_brought_up_to_date(bucket, capsys):
  put(f"{bucket}/data/sub/._b.txt", b"of macOS")
  for name in ("a.txt", "sub/b.txt", "sub/c.txt"):
    put(f"{bucket}/data/{name}", name.encode())
  folder = files.fetch(f"{bucket}/data")
  assert (folder / "sub/b.txt").read_text() == "sub/b.txt"
  assert not (folder / "sub/._b.txt").exists()
  assert f"{bucket}/data: 3 files" in capsys.readouterr().out
  assert files.fetch(f"{bucket}/data") == folder and capsys.readouterr().out == ""
  put(f"{bucket}/data/a.txt", b"changed")
  fsspec.core.url_to_fs(bucket)[0].rm(f"{bucket}/data/sub/c.txt")
  files.fetch(f"{bucket}/data")
  assert "1 files" in capsys.readouterr().out
  assert (folder / "a.txt").read_text() == "changed"
  assert not (folder / "sub/c.txt").exists() and (folder / "sub/b.txt").exists()


def test_any_error_of_a_client_is_one_of_the_system(bucket, monkeypatch):
  def fail(*args, **options):
    raise RuntimeError("no credentials")

  monkeypatch.setattr(files, "_files", fail)
  with pytest.raises(OSError, match="cannot be reached .no credentials."):
    files.fetch(f"{bucket}/run")
  with pytest.raises(OSError, match="cannot be reached"):
    with files.working_folder(f"{bucket}/run"):
      raise AssertionError("not entered")


def test_a_missing_folder_is_an_error(bucket):
  with pytest.raises(FileNotFoundError, match="nowhere"):
    files.fetch(f"{bucket}/nowhere")


def test_a_working_folder_is_sent_at_the_end_and_found_again(bucket):
  with files.working_folder(f"{bucket}/run") as folder:
    (folder / "checkpoints/save_0").mkdir(parents=True)
    (folder / "checkpoints/save_0/state").write_text("zero")
    (folder / "metrics.jsonl").write_text("1\n")
    for name in (".a.partial", ".lock", ".DS_Store", "checkpoints/save_1.orbax-checkpoint-tmp/y"):
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      (folder / name).write_text("on its way")
  assert not folder.exists()
  assert names(f"{bucket}/run") == {".index.json", "checkpoints/save_0/state", "metrics.jsonl"}
  with files.working_folder(f"{bucket}/run") as folder:
    assert (folder / "checkpoints/save_0/state").read_text() == "zero"
    shutil.rmtree(folder / "checkpoints/save_0")
    (folder / "checkpoints/save_1").mkdir()
    (folder / "checkpoints/save_1/state").write_text("one")
  assert names(f"{bucket}/run") == {".index.json", "checkpoints/save_1/state", "metrics.jsonl"}


@pytest.mark.parametrize("error", [SystemExit(143), FloatingPointError("nan")])
def test_a_working_folder_is_sent_however_the_work_ends(bucket, error):
  with pytest.raises(type(error)):
    with files.working_folder(f"{bucket}/run") as folder:
      (folder / "saved").write_text("x")
      raise error
  assert text(f"{bucket}/run/saved") == "x"


def test_files_of_an_interrupted_upload_are_ignored(bucket):
  with files.working_folder(f"{bucket}/run") as folder:
    (folder / "save_0").write_text("whole")
  put(f"{bucket}/run/save_1/part", b"half of a checkpoint")  # and then the process was killed
  with files.working_folder(f"{bucket}/run") as folder:
    assert [path.name for path in folder.iterdir()] == ["save_0"]
  assert {path.name for path in files.fetch(f"{bucket}/run").glob("[!.]*")} == {"save_0"}


def test_a_folder_is_sent_while_the_work_goes_on(bucket, monkeypatch):
  monkeypatch.setattr(files, "_PUSH_SECONDS", 0.05)
  with files.working_folder(f"{bucket}/run") as folder:
    (folder / "early").write_text("x")
    commands.wait_until(lambda: "early" in names(f"{bucket}/run"))


def test_only_one_of_several_processes_sends(bucket, monkeypatch):
  monkeypatch.setattr(machine, "is_primary", lambda: False)
  with files.working_folder(f"{bucket}/run") as folder:
    (folder / "mine").write_text("x")
  assert names(f"{bucket}/run") == set() and not folder.exists()


def test_a_folder_that_cannot_be_sent_is_kept_and_does_not_stop_the_work(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setenv(files.CACHE, str(tmp_path / "cache"))
  monkeypatch.setattr(files, "_PUSH_SECONDS", 0.02)
  monkeypatch.setattr(files, "_send", lambda *args: 1 / 0)
  with pytest.raises(OSError, match="written") as error:
    with files.working_folder("memory://bucket/run") as folder:
      (folder / "result").write_text("x")
      time.sleep(0.2)
  (kept,) = (tmp_path / "cache" / "working").iterdir()
  assert (kept / "result").read_text() == "x" and str(kept) in str(error.value)
  assert len([m for m in caplog.messages if "tried again" in m]) == 1


def test_files_appear_whole_or_not_at_all(bucket):
  with files.replacing(f"{bucket}/out/a.csv", newline="") as file:
    file.write("a\n")
  assert text(f"{bucket}/out/a.csv") == "a\n"
  with pytest.raises(ZeroDivisionError):
    with files.replacing(f"{bucket}/out/a.csv") as file:
      file.write("half")
      raise ZeroDivisionError
  assert text(f"{bucket}/out/a.csv") == "a\n"


@pytest.fixture
def remote_root(bucket, data_root):
  """The synthetic data in a bucket."""
  for path in data_root.parent.rglob("*"):
    if path.is_file():
      put(f"{bucket}/data/{path.relative_to(data_root.parent).as_posix()}", path.read_bytes())
  return f"{bucket}/data/npz"


def test_data_are_read_from_a_bucket(remote_root, data_root):
  found = npz.split_files(remote_root, "tile:xla", "valid")
  expected = npz.split_files(data_root, "tile:xla", "valid")
  assert [path.name for path in found] == [path.name for path in expected]
  assert all(a.read_bytes() == b.read_bytes() for a, b in zip(found, expected))
  with pytest.raises(FileNotFoundError, match="layout/nlp/random/train"):
    npz.split_files(remote_root, "layout:nlp:random", "train")
  collection = datasets.Collection("layout:xla:random")
  assert datasets.is_synthetic(remote_root, collection)
  assert not datasets.is_synthetic(f"{remote_root}/x/npz", collection)


@pytest.mark.parametrize(
  "bucket", ["s3" if importlib.util.find_spec("moto") else "memory"], indirect=True
)
def test_a_run_lives_in_a_bucket(bucket, remote_root):
  fields = parts.TINY | {"model.num_layers": 1, "model.hidden_dim": 8}
  config = parts.config_of("tile", "MLP,ci", data_root=remote_root, **fields)
  place = f"{bucket}/runs/tile"
  with files.working_folder(place) as folder:
    training.run(config, folder, do=["train"])
  with files.working_folder(place) as folder:  # another machine goes on
    training.run(config, folder, do=["predict"])
  assert {"model.npz", "results.csv", "summary.json", "config.json"} <= names(place)
  assert json.loads(text(f"{place}/summary.json"))["training"]["step"] == 2
  graph = npz.read_tile(npz.split_files(remote_root, "tile:xla", "test")[0])
  order, _ = tpugraphs_jax.rank(place, graph)
  again, _ = tpugraphs_jax.rank(f"{place}/model.npz", graph)
  np.testing.assert_array_equal(order, again)
  submission.combine(f"{bucket}/submission.csv", [f"{place}/results.csv"])
  problems = submission.check(f"{bucket}/submission.csv", remote_root)
  assert problems and all(": layout:" in problem for problem in problems)  # tiles are complete
  report.write([place], f"{bucket}/report.html")
  assert "tile:xla" in text(f"{bucket}/report.html")


def test_commands_that_need_a_local_folder_refuse_buckets(capsys):
  assert download.main(["--data_root", "gs://a/b"]) == 2
  assert main(["convert", "a.pb", "--out", "gs://a"]) == 2
  assert official.main(["--config=tile.py", "--weights=a", "--data_root=b", "--out=gs://a"]) == 2
  assert capsys.readouterr().err.count("gs://a") == 3
  with pytest.raises(ValueError, match="store is gs://b, expected a folder of this machine"):
    store.ensure_store("gs://a/npz", "layout:xla:random", "valid", store_dir="gs://b")
