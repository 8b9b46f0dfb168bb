"""Downloads from a local server that breaks connections, cannot resume or sends wrong data."""

from __future__ import annotations

import gzip
import http.server
import io
import os
import re
import socket
import struct
import tarfile
import threading
import time

import numpy as np
import pytest

from tpugraphs_jax import datasets, graph
from tpugraphs_jax.data import download

TILE = "tile:xla"


def _npz_bytes(seed):
  file = io.BytesIO()
  np.savez(file, config_runtime=np.random.default_rng(seed).integers(1, 9, size=500))
  return file.getvalue()


def _members(collection, splits=graph.SPLITS):
  folder = f"npz/{collection.replace(':', '/')}"
  return {
    f"{folder}/{split}/{i}.npz": _npz_bytes(10 * i + len(split))
    for split in splits
    for i in range(2)
  }


def _tar_bytes(members):
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode="w") as tar:
    for name, content in members.items():
      info = tarfile.TarInfo(name)
      info.size = len(content)
      tar.addfile(info, io.BytesIO(content))
  return file.getvalue()


class _Server(http.server.ThreadingHTTPServer):
  """Serves `files`; `requests` holds the Range header of each request."""

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.files: dict[str, bytes] = {}
    self.requests: list[str | None] = []
    self.etag: str | None = '"one"'
    self.has_ranges = True
    self.checks_if_range = True
    self.break_after: list[int] = []  # bytes sent by the first, second ... answer
    self.resets = False  # whether broken answers end in a reset of the connection
    self.url = f"http://127.0.0.1:{self.server_port}/"


class _Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *_):
    pass

  def do_GET(self):
    server = self.server
    server.requests.append(self.headers.get("Range"))
    content = server.files.get(self.path.strip("/"))
    if content is None:
      self.send_error(404)
      return
    start = self._start() if server.has_ranges else 0
    if start and start >= len(content):
      self.send_response(416)
      self.send_header("Content-Range", f"bytes */{len(content)}")
      self.send_header("Content-Length", "0")
      self.end_headers()
      return
    self.send_response(206 if start else 200)
    if start:
      end = f"{len(content) - 1}/{len(content)}"
      self.send_header("Content-Range", f"bytes {start}-{end}")
    self.send_header("Content-Length", str(len(content) - start))
    if server.etag:
      self.send_header("ETag", server.etag)
    self.end_headers()
    is_broken = bool(server.break_after)
    sent = server.break_after.pop(0) if is_broken else len(content)
    self.wfile.write(content[start : start + sent])
    if is_broken and server.resets:
      time.sleep(0.2)  # a reset discards what the client has not read
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
      os.close(self.connection.detach())

  def _start(self):
    match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
    is_same = self.headers.get("If-Range") == self.server.etag
    if not match or (self.server.checks_if_range and not is_same):
      return 0
    return int(match[1])


@pytest.fixture(autouse=True)
def _no_pauses_and_no_proxy(monkeypatch):
  monkeypatch.setattr(download, "_PAUSE_SECONDS", 0.0)
  monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(name="server")
def _server():
  with _Server() as server:
    for collection in datasets.RELEASED:
      server.files[download.archive_name(collection)] = _tar_bytes(_members(collection))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def _fetch(server, root, collection=TILE, **options):
  return download.download_collection(root, collection, base_url=server.url, **options)


def _assert_complete(root, collection=TILE):
  """Every file is there with its content, and nothing else is."""
  expected = {name.removeprefix("npz/"): content for name, content in _members(collection).items()}
  found = {
    str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
  }
  assert found == expected


@pytest.mark.parametrize("collection", datasets.RELEASED)
def test_collection_lies_in_its_folder_and_nothing_else_stays(server, tmp_path, collection):
  folder = _fetch(server, tmp_path, collection)
  assert folder == tmp_path.joinpath(*collection.split(":"))
  _assert_complete(tmp_path, collection)


@pytest.mark.parametrize("resets", [False, True])
def test_broken_transfer_is_resumed_within_one_run(server, tmp_path, resets):
  server.break_after, server.resets = [3000, 2000], resets
  _fetch(server, tmp_path)
  assert server.requests == [None, "bytes=3000-", "bytes=5000-"]
  _assert_complete(tmp_path)


def test_next_run_goes_on_where_an_interrupted_one_stopped(server, tmp_path):
  server.break_after = [3000, 0, 0, 0]
  with pytest.raises(download.DownloadError):
    _fetch(server, tmp_path)
  assert not (tmp_path / "tile").exists()
  server.requests.clear()
  _fetch(server, tmp_path)
  assert server.requests == ["bytes=3000-"]
  _assert_complete(tmp_path)


@pytest.mark.parametrize("has_ranges, etag", [(False, '"one"'), (True, None)])
def test_server_that_cannot_resume_sends_everything_again(server, tmp_path, has_ranges, etag):
  server.has_ranges, server.etag = has_ranges, etag
  server.break_after = [3000]
  _fetch(server, tmp_path)
  assert len(server.requests) == 2
  _assert_complete(tmp_path)


@pytest.mark.parametrize("more, requests", [(b"", 1), (b"more", 2)])
def test_a_complete_part_is_not_repeated_and_a_longer_one_thrown_away(
  server, tmp_path, more, requests
):
  content = server.files["npz_tile_xla.tar"] + more
  (tmp_path / "npz_tile_xla.tar.part").write_bytes(content)
  (tmp_path / "npz_tile_xla.tar.part.id").write_text('"one"')
  _fetch(server, tmp_path)
  assert server.requests == [f"bytes={len(content)}-", None][:requests]
  _assert_complete(tmp_path)


def test_a_name_that_is_too_long_leaves_nothing_unpacked(server, tmp_path):
  members = _members(TILE) | {f"npz/tile/xla/train/{'x' * 300}.npz": b"x"}
  server.files["npz_tile_xla.tar"] = _tar_bytes(members)
  with pytest.raises(OSError) as error:
    _fetch(server, tmp_path)
  assert "\n" not in str(error.value)
  assert not list(tmp_path.rglob("*.unpacking")) and not (tmp_path / "tile").exists()


def _end_of_first_file(content):
  with tarfile.open(fileobj=io.BytesIO(content)) as tar:
    return tar.getmembers()[1].offset


def _twice(content):
  """A tar whose last member comes again, with other bytes."""
  file = io.BytesIO(content)
  with tarfile.open(fileobj=file, mode="a") as tar:
    info = tarfile.TarInfo(tar.getnames()[-1])
    info.size = 3
    tar.addfile(info, io.BytesIO(b"bad"))
  return file.getvalue()


def _with_changed_bytes(content):
  at = content.index(b"config_runtime") + 1000  # within an array
  return content[:at] + b"XXXX" + content[at + 4 :]


@pytest.mark.parametrize(
  "damage, complaint",
  [
    (lambda content: content[:5000], "end"),
    (lambda content: content[: _end_of_first_file(content)], "end"),
    (lambda content: content[: _end_of_first_file(content)] + b"x" * 9000, "end"),
    (lambda content: b"", "empty"),
    (lambda content: b"<html>not here</html>" * 100, "invalid header"),
    (gzip.compress, "damaged"),
    (_twice, "twice"),
    (_with_changed_bytes, "complete"),
    (lambda content: _tar_bytes(_members("layout:xla:random")), "split train"),
    (lambda content: _tar_bytes(_members(TILE, ("train", "valid"))), "split test"),
    (
      lambda content: _tar_bytes(_members(TILE) | {"npz/tile/xla/test/0.npz": _npz_bytes(0)[:-50]}),
      "test/0.npz",
    ),
  ],
)
def test_damaged_archive_is_refused_and_leaves_no_folder(server, tmp_path, damage, complaint):
  root = tmp_path / "root"
  server.files["npz_tile_xla.tar"] = damage(server.files["npz_tile_xla.tar"])
  with pytest.raises(download.DownloadError, match=complaint) as error:
    _fetch(server, root)
  assert "\n" not in str(error.value)
  assert not list(root.iterdir())


def test_damaged_archive_of_the_users_own_stays(tmp_path):
  (tmp_path / "npz_tile_xla.tar").write_bytes(b"nothing of the kind")
  with pytest.raises(download.DownloadError):
    download.download_collection(tmp_path, TILE)
  assert [path.name for path in tmp_path.iterdir()] == ["npz_tile_xla.tar"]


@pytest.mark.parametrize(
  "checks, requests", [(True, ["bytes=3000-"]), (False, ["bytes=3000-", None])]
)  # sends the new file's rest
def test_no_part_of_a_file_that_changed_on_the_server_is_kept(server, tmp_path, checks, requests):
  server.break_after = [3000, 0, 0, 0]
  server.files["npz_tile_xla.tar"], content = bytes(9000), server.files["npz_tile_xla.tar"]
  with pytest.raises(download.DownloadError):
    _fetch(server, tmp_path)
  server.files["npz_tile_xla.tar"], server.etag = content, '"two"'
  server.checks_if_range = checks
  server.requests.clear()
  _fetch(server, tmp_path)
  assert server.requests == requests
  _assert_complete(tmp_path)


def test_transfers_that_begin_anew_and_break_again_come_to_an_end(server, tmp_path):
  server.has_ranges, server.break_after = False, [3000, 2000, 3000, 2000, 3000]
  with pytest.raises(download.DownloadError):
    _fetch(server, tmp_path)
  assert len(server.requests) == 4


def test_too_little_disk_space_is_an_error_before_anything_is_fetched(
  server, tmp_path, monkeypatch
):
  usage = download.shutil.disk_usage(tmp_path)
  monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage._replace(free=100))
  with pytest.raises(download.DownloadError):
    _fetch(server, tmp_path)
  assert not list(tmp_path.iterdir())


def test_files_of_no_graph_are_left_out_and_named(server, tmp_path, capsys):
  root = tmp_path / "root"
  other = {"../outside.npz": b"x", "npz/tile/xla/train/../../up.npz": b"x"}
  server.files["npz_tile_xla.tar"] = _tar_bytes(_members(TILE) | other)
  _fetch(server, root)
  _assert_complete(root)
  assert [path.name for path in tmp_path.iterdir()] == ["root"]
  printed = capsys.readouterr().out
  for name in other:
    assert f"left out {name!r}" in printed


def test_collection_that_is_there_is_left_alone(server, tmp_path, capsys):
  (tmp_path / "tile" / "xla").mkdir(parents=True)
  _fetch(server, tmp_path)
  assert not server.requests
  assert "exists, left alone" in capsys.readouterr().out


def test_an_archive_that_is_there_is_used(server, tmp_path):
  (tmp_path / "npz_tile_xla.tar").write_bytes(server.files["npz_tile_xla.tar"])
  _fetch(server, tmp_path)
  assert not server.requests
  _assert_complete(tmp_path)


def test_missing_archive_is_a_one_line_error(server, tmp_path, capsys):
  server.files.clear()
  argv = ["--data_root", str(tmp_path), "--base_url", server.url]
  assert download.main([*argv, "--collections", TILE]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: {server.url}npz_tile_xla.tar: the server answers 404")


@pytest.mark.parametrize("base_url", ["file:///mnt/mirror", "gs://bucket/folder", "mirror"])
def test_a_place_that_is_not_of_http_is_refused(tmp_path, base_url):
  with pytest.raises(ValueError, match="base_url"):
    download.download_collection(tmp_path, "tile:xla", base_url=base_url)


@pytest.mark.parametrize("link", [".tar.part", ".tar.unpacking"])
def test_nothing_is_downloaded_or_unpacked_through_a_link(server, tmp_path, link):
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "precious").write_text("kept")
  target = tmp_path / ("precious" if link.endswith("part") else "elsewhere")
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / f"npz_tile_xla{link}").symlink_to(target)
  try:
    _fetch(server, tmp_path / "data")
  except ValueError as error:
    assert "a link to" in str(error)
  assert (tmp_path / "precious").read_text() == "kept"
  assert not list((tmp_path / "elsewhere").iterdir())
