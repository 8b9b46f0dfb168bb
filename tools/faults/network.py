"""Downloads from a server that breaks off, stalls or answers wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import hashlib
import http.server
import io
import os
from pathlib import Path
import re
import shutil
import socket
import struct
import tarfile
import threading
import time
from unittest import mock

import numpy as np

from tools.faults.inputs import Hung, limit
from tools.faults.kills import all_files
from tools.faults.table import Row
from tpugraphs_jax import graph
from tpugraphs_jax.data import download

_COLLECTION = "tile:xla"
_SECONDS = 30.0  # limit for one download of a few kilobytes
_TIMEOUT_SECONDS = 0.5  # timeout of the client


class Server(http.server.ThreadingHTTPServer):
  """Serves one archive, with a fault from `faults` in each request until none is left."""

  daemon_threads = True
  block_on_close = False

  def __init__(self, content: bytes, second: bytes):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.content, self.other = content, second
    self.identity, self.faults = "ETag", iter(())
    self.url = f"http://127.0.0.1:{self.server_port}/"

  def handle_error(self, *_):
    pass  # no traceback where a client hangs up


class _Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *_):
    pass

  def do_GET(self):
    fault, cut = next(self.server.faults, ("none", 1.0))
    if self.path == "/round":
      fault = "redirect in circles"
    FAULTS[fault](self, cut)

  def start(self, content: bytes, *, always: bool = False) -> int:
    """First byte that the client asks for; 0 if its part is of another file, unless `always`."""
    asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
    is_same = self.headers.get("If-Range") == self.identity(content)
    return int(asked[1]) if asked and (is_same or always) else 0

  def identity(self, content: bytes) -> str:
    number = hashlib.md5(content).hexdigest()
    return f'"{number}"' if self.server.identity == "ETag" else f"Sat, 01 Jan 2000 {number[:8]}"

  def answer(
    self, content: bytes, start: int, *, status: int = 0, cut: float = 1.0, headers=None
  ) -> None:
    """Answers with `content` from byte `start` on; sends only the share `cut` of the body."""
    body = content[start:]
    if start and not body:
      self.send_response(416)
      self.send_header("Content-Range", f"bytes */{len(content)}")
      self.end_headers()
      return
    self.send_response(status or (206 if start else 200))
    given = {"Content-Length": str(len(body))}
    if start:
      given["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    if self.server.identity:
      given[self.server.identity] = self.identity(content)
    for name, value in (given | (headers or {})).items():
      if value is not None:
        self.send_header(name, value)
    self.end_headers()
    self.wfile.write(body[: int(cut * len(body))])
    self.wfile.flush()


def _plain(**options) -> Callable[[_Handler, float], None]:
  """A fault that answers correctly except for `options` of `_Handler.answer`."""

  def handle(handler: _Handler, cut: float) -> None:
    content = handler.server.content
    handler.answer(content, handler.start(content), **options)

  return handle


def _truncates(handler, cut):
  content = handler.server.content
  handler.answer(content, handler.start(content), cut=cut)


def _stalls(handler, cut):
  _truncates(handler, cut)
  time.sleep(2 * _TIMEOUT_SECONDS)


def _resets(handler, cut):
  _truncates(handler, cut)
  linger = struct.pack("ii", 1, 0)
  handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
  os.close(handler.connection.detach())  # closes at once, without an orderly shutdown


def _ignores_ranges(handler, cut):
  handler.answer(handler.server.content, 0, cut=cut)


def _changes_in_between(handler, cut):
  handler.answer(handler.server.other, handler.start(handler.server.other), cut=cut)


def _sends_the_rest_of_another(handler, cut):
  second = handler.server.other
  handler.answer(second, handler.start(second, always=True), cut=cut)


def _starts_elsewhere(handler, cut):
  handler.answer(handler.server.content, int(cut * len(handler.server.content)))


def _flips_bytes(handler, cut):
  content = bytearray(handler.server.content)
  identity = handler.identity(handler.server.content)
  content[int(cut * (len(content) - 1))] ^= 4
  start = handler.start(handler.server.content)
  named = {handler.server.identity: identity} if handler.server.identity else {}
  handler.answer(bytes(content), start, headers=named)


def _redirects(to: str) -> Callable[[_Handler, float], None]:
  def handle(handler: _Handler, cut: float) -> None:
    handler.send_response(302)
    handler.send_header("Location", to)
    handler.send_header("Content-Length", "0")
    handler.end_headers()

  return handle


def _fails(status: int) -> Callable[[_Handler, float], None]:
  return lambda handler, cut: handler.send_error(status)


def _login_page(handler, cut):
  handler.answer(b"<html>please log in</html>" * 50, 0)


def _speaks_no_http(handler, cut):
  handler.wfile.write(b"\x00\xff garbage\r\n\r\n")


def _endless_header(handler, cut):
  handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: " + b"x" * 200_000)


FAULTS = {
  "none": _plain(),
  "truncated": _truncates,
  "stalls": _stalls,
  "reset": _resets,
  "ignores ranges": _ignores_ranges,
  "changed in between": _changes_in_between,
  "sends the rest of another file": _sends_the_rest_of_another,
  "starts elsewhere": _starts_elsewhere,
  "flips a bit": _flips_bytes,
  "redirect": _redirects("/there"),
  "redirect in circles": _redirects("/round"),
  "redirect to a file": _redirects("file:///etc/hostname"),
  "redirect to nowhere": _redirects("http://127.0.0.1:1/"),
  "redirect to nonsense": _redirects("http://[/"),
  "404": _fails(404),
  "429": _fails(429),
  "500": _fails(500),
  "503": _fails(503),
  "416": _fails(416),
  "login page": _login_page,
  "no HTTP": _speaks_no_http,
  "endless header": _endless_header,
  "length too small": _plain(headers={"Content-Length": "5000"}),
  "length too large": _plain(headers={"Content-Length": "9999999"}),
  "length absurd": _plain(headers={"Content-Length": str(10**17)}),
  "length negative": _plain(headers={"Content-Length": "-1"}),
  "length a word": _plain(headers={"Content-Length": "many"}),
  "length missing": _plain(headers={"Content-Length": None}),
  "range nonsense": _plain(headers={"Content-Range": "bytes all"}),
}


def archive(seed: int) -> tuple[bytes, dict[str, bytes]]:
  """A small archive in the released format, and its files by their path in the data root."""
  rng, files, stream = np.random.default_rng(seed), {}, io.BytesIO()
  with tarfile.open(fileobj=stream, mode="w") as tar:
    for number, split in enumerate(2 * graph.SPLITS):
      npz = io.BytesIO()
      np.savez(npz, config_runtime=rng.integers(1, 2**40, size=500))
      name = f"{_COLLECTION.replace(':', '/')}/{split}/{number}.npz"
      files[name] = npz.getvalue()
      info = tarfile.TarInfo(f"npz/{name}")
      info.size = len(files[name])
      tar.addfile(info, io.BytesIO(files[name]))
  return stream.getvalue(), files


def _download(server: Server, folder: Path) -> tuple[int, list[str]]:
  """Runs the download command; returns its exit code and the lines of standard error."""
  said = io.StringIO()
  with limit(_SECONDS), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
    code = download.main(
      ["--data_root", str(folder), "--base_url", server.url, "--collections", _COLLECTION]
    )
  return code, said.getvalue().splitlines()


def _outcome(server: Server, folder: Path, kinds: list[dict[str, bytes]]) -> str:
  """`survived`, `refused` or what went wrong; after a refusal, a second try has to succeed.

  Args:
    server: serves with its faults at first, and without any after a refusal.
    folder: data root.
    kinds: contents of the archive, then of the other archive, by path.
  """
  try:
    code, lines = _download(server, folder)
    files = all_files(folder)
    if not code:
      return "survived" if files in kinds else f"another result in silence: {sorted(files)}"
    if len(lines) != 1 or not lines[0].startswith("error: "):
      return f"not one line: {lines}"
    if (folder / "tile").exists():
      return f"left the folder of the collection after {lines[0]}"
    server.faults = iter(())
    code, again = _download(server, folder)
    files = all_files(folder)
    right = not code and files == kinds[0]
    return "refused" if right else f"after {lines} the next one: {code} {again} {sorted(files)}"
  except Hung:
    return f"took more than {_SECONDS} s"


def rows(folder: Path, *, times: int, rng: np.random.Generator) -> Iterator[Row]:
  """Tries every fault, in some or in all requests of a download; yields one row.

  Args:
    folder: folder for the data root.
    times: downloads for each fault.
    rng: draws where and how often a fault occurs, and with which headers.
  """
  row = Row("network, download")
  (content, files), (second, other_files) = archive(0), archive(1)
  with (
    mock.patch.multiple(download, _PAUSE_SECONDS=0.0, _TIMEOUT_SECONDS=_TIMEOUT_SECONDS),
    mock.patch.dict("os.environ", no_proxy="127.0.0.1"),
    Server(content, second) as server,
  ):
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for fault in FAULTS:
      for number in range(times):
        count = int(rng.integers(1, 4)) if number % 3 else 100
        before = "truncated" if rng.random() < 0.5 else fault  # leaves a part to resume
        server.faults = iter([(name, rng.random()) for name in [before] + [fault] * count])
        server.identity = str(rng.choice(["ETag", "Last-Modified", ""]))
        data = folder / "download"
        row.count(_outcome(server, data, [files, other_files]), of=f"{fault} {number}")
        shutil.rmtree(data, ignore_errors=True)
    server.shutdown()
  yield row
