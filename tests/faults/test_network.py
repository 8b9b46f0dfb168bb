"""Downloads from a server that stalls or answers wrongly are right or refused, and go on."""

import http.server
import io
import tarfile
import threading
import time

import numpy as np
import pytest

from tests.support import faults
from tpugraphs_jax.data import download

_COLLECTION = "tile:xla"
_TIMEOUT_SECONDS = 0.5  # of the client


def _archive():
  """A small archive in the released form, and its files by path."""
  rng, stream, files = np.random.default_rng(0), io.BytesIO(), {}
  with tarfile.open(fileobj=stream, mode="w") as tar:
    for number, split in enumerate(("train", "valid", "test")):
      npz = io.BytesIO()
      np.savez(npz, config_runtime=rng.integers(1, 2**40, size=500))
      name = f"tile/xla/{split}/{number}.npz"
      info = tarfile.TarInfo(f"npz/{name}")
      info.size, files[name] = len(npz.getvalue()), npz.getvalue()
      tar.addfile(info, io.BytesIO(files[name]))
  return stream.getvalue(), files


def _answers(status=200, to=1.0, body=None, **headers):
  """An answer with a share of its body, other content, or other headers (None: without)."""

  def answer(handler, content):
    content = content if body is None else body
    handler.send_response(status)
    given = {"Content-Length": str(len(content)), "ETag": '"1"'}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in (given | named).items():
      if value is not None:
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content[: int(to * len(content))])

  return answer


def _stalls(handler, content):
  _answers(to=0.5)(handler, content)
  handler.wfile.flush()
  time.sleep(2 * _TIMEOUT_SECONDS)


def _flips_a_bit(handler, content):
  flipped = bytearray(content)
  flipped[len(content) // 3] ^= 4
  _answers(body=bytes(flipped))(handler, content)


FAULTS = {
  "stalls": _stalls,
  "flips a bit": _flips_a_bit,
  "sends the end as the whole": lambda handler, content: _answers(body=content[700:])(
    handler, content
  ),
  "redirect in circles": _answers(302, body=b"", Location="/round"),
  "redirect to a file": _answers(302, body=b"", Location="file:///etc/hostname"),
  "redirect to nonsense": _answers(302, body=b"", Location="http://[/"),
  **{str(status): _answers(status, body=b"") for status in (404, 416, 429, 500, 503)},
  "login page": _answers(body=b"<html>please log in</html>" * 50),
  "no HTTP": lambda handler, content: handler.wfile.write(b"\x00\xff garbage\r\n\r\n"),
  "endless header": lambda handler, content: handler.wfile.write(
    b"HTTP/1.0 200 OK\r\nX: " + b"x" * 200_000
  ),
  **{
    f"length {length}": _answers(Content_Length=length)
    for length in ("5000", "9999999", str(10**17), "-1", "many", None)
  },
  "range nonsense": _answers(206, Content_Range="bytes all"),
}


@pytest.fixture(name="server")
def _server(monkeypatch):
  monkeypatch.setattr(download, "_PAUSE_SECONDS", 0.0)
  monkeypatch.setattr(download, "_TIMEOUT_SECONDS", _TIMEOUT_SECONDS)
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  content, files = _archive()

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      self.server.requests -= 1
      answer = self.server.fault if self.server.requests >= 0 else _answers()
      answer(self, content)

    def log_message(self, *_):
      pass

  class Server(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, *_):
      pass  # no traceback where a client hangs up

  with Server(("127.0.0.1", 0), Handler) as server:
    server.files = files
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.parametrize("requests", [1, 100])
@pytest.mark.parametrize("fault", FAULTS)
def test_downloads_from_a_bad_server_are_right_or_refused_and_go_on(
  fault, requests, server, tmp_path, capsys
):
  """The first or all requests of the first call meet the fault, none of the second."""
  url = f"http://127.0.0.1:{server.server_port}/"
  arguments = ["--data_root", str(tmp_path), "--base_url", url, "--collections", _COLLECTION]
  server.fault, server.requests = FAULTS[fault], requests
  started = time.monotonic()
  code = download.main(arguments)
  assert time.monotonic() - started < 30
  if code:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and not (tmp_path / "tile").exists()
    server.requests = 0
    assert download.main(arguments) == 0
  assert faults.all_files(tmp_path) == server.files
