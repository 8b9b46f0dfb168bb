"""Says in one line which process of a run is gone, and ends this one.

jax notices as well: a reduction fails or a heartbeat runs out. Its messages speak of
connections, take many lines and do not always name the process. Here every process keeps
one more connection to process 0 and sends a sign of life on it every second:

    process 1 ──┐
    process 2 ──┼── process 0         "process 2 is gone" goes the same ways
    process 3 ──┘

A connection that closes without a farewell, or on which nothing comes for too long, is a
process that is gone. Where connections cannot be made the run goes on without them.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
import os
import secrets
import select
import socket
import sys
import threading
import time

from absl import logging

_SIGN, _FAREWELL, _GONE = b"alive", b"farewell", b"gone "
_FAREWELL_SECONDS = 5.0
_SIGN_SECONDS = 1.0
_CONNECT_SECONDS = 20.0
# A reduction fails in the moment in which a connection closes: its error waits for the line.
VERDICT_SECONDS = 2.0


class Link:
  """A connection to another process that carries lines.

  Attributes:
    name: of the other process, as messages tell it.
    heard: when something last came, by `time.monotonic`.
  """

  def __init__(self, connection: socket.socket, name: str):
    connection.settimeout(_SIGN_SECONDS)  # so long may a full connection hold up a line
    self.name, self.heard = name, time.monotonic()
    self._connection, self._rest = connection, b""

  def fileno(self) -> int:
    return self._connection.fileno()

  def send(self, line: bytes) -> None:
    """Sends a line; the reader of a closed connection notices by itself."""
    try:
      self._connection.sendall(line + b"\n")
    except OSError:
      pass

  def close(self) -> None:
    self._connection.close()

  def receive(self) -> list[bytes] | None:
    """The lines that have come, without the last one if it is not whole; None at the end."""
    try:
      data = self._connection.recv(4096)
    except TimeoutError:
      return []
    except OSError:
      return None
    if not data:
      return None
    self.heard = time.monotonic()
    *lines, self._rest = (self._rest + data).split(b"\n")
    return lines


class Watch(threading.Thread):
  """Watches the links of a process until it ends.

  Args:
    links: by index of the other process.
    silence_seconds: without a line from it a process counts as gone.
    end: is called once, with what happened, and is expected to end the process.
  """

  def __init__(self, links: Mapping[int, Link], *, silence_seconds: float,
               end: Callable[[str], None]):
    super().__init__(name="peers", daemon=True)
    self._links, self._silence_seconds, self._end = dict(links), silence_seconds, end
    self._is_leaving = threading.Event()

  def run(self) -> None:
    try:
      self._watch()
    finally:
      for link in self._links.values():
        link.close()

  def _watch(self) -> None:
    while self._links:
      for link in self._links.values():
        link.send(_SIGN)
      readable = select.select(list(self._links.values()), [], [], _SIGN_SECONDS)[0]
      for index, link in list(self._links.items()):
        verdict = self._verdict(index, link, link in readable)
        if verdict and self._is_leaving.is_set():
          self._links.pop(index).close()
        elif verdict:
          self._tell_others(index, verdict)
          self._end(verdict)
          return

  def farewell(self) -> None:
    """Tells the others that this process ends well, and waits until they have heard it.

    A connection that is closed before takes the farewell with it.
    """
    self._is_leaving.set()
    for link in list(self._links.values()):
      link.send(_FAREWELL)
    self.join(timeout=_FAREWELL_SECONDS)

  def _verdict(self, index: int, link: Link, is_readable: bool) -> str:
    """What is wrong with a process, or nothing."""
    lines = link.receive() if is_readable else []
    if lines is None:
      return f"{link.name} is gone: its connection has closed"
    for line in lines:
      if line == _FAREWELL:
        self._links.pop(index).close()
        return ""
      if line.startswith(_GONE):
        return line.removeprefix(_GONE).decode(errors="replace")
    silent = time.monotonic() - link.heard
    if silent > self._silence_seconds:
      return f"{link.name} stands still or cannot be reached: nothing came for {silent:.0f} s"
    return ""

  def _tell_others(self, index: int, verdict: str) -> None:
    others = [link for other, link in self._links.items() if other != index]
    for link in others:
      link.send(_GONE + verdict.encode())
    if others:
      time.sleep(_SIGN_SECONDS)  # until they have read it: see `farewell`


def start(
    index: int, processes: int, share: Callable[[object], object], *, host: str | None = None,
    silence_seconds: float,
) -> Watch | None:
  """Connects this process with the others of a run and watches them.

  Args:
    index: of this process.
    processes: how many there are.
    share: gives every process the value of process 0; all processes call it.
    host: of process 0, as the others reach it; unless given, by the name of its machine.
    silence_seconds: without a sign of life a process counts as gone.

  Returns:
    The watch, or None where no connection could be made.
  """
  name = lambda number, of, pid: f"process {number} of {processes} (host {of}, process id {pid})"
  own = (socket.gethostname(), os.getpid())
  server = socket.create_server(("", 0)) if not index else None
  address = (host or own[0], server.getsockname()[1]) if server else None
  address, token, primary = share((address, secrets.token_hex(16), own))
  try:
    if server:
      links = {number: Link(connection, name(number, of, pid))
               for number, of, pid, connection in _accepted(server, processes - 1, token)}
    else:
      connection = socket.create_connection(tuple(address), _CONNECT_SECONDS)
      connection.sendall(f"{token} {index} {own[1]} {own[0]}\n".encode())
      links = {0: Link(connection, name(0, *primary))}
  except OSError as error:
    logging.warning("No connection to process 0 at %s:%s (%s): when a process of the run dies, "
                    "its number may stay unknown", *address, error)
    return None
  watch = Watch(links, silence_seconds=silence_seconds, end=end)
  watch.start()
  atexit.register(watch.farewell)
  return watch


def _accepted(
    server: socket.socket, expected: int, token: str
) -> list[tuple[int, str, int, socket.socket]]:
  """Number, host, process id and connection of the processes that have connected."""
  found = []
  deadline = time.monotonic() + _CONNECT_SECONDS
  with server:
    while len(found) < expected and time.monotonic() < deadline:
      server.settimeout(max(0.1, deadline - time.monotonic()))
      try:
        connection, _ = server.accept()
        connection.settimeout(_CONNECT_SECONDS)
        with connection.makefile("r") as file:
          words = file.readline().split()
      except (OSError, ValueError):
        continue
      if len(words) == 4 and secrets.compare_digest(words[0], token):
        found.append((int(words[1]), words[3], int(words[2]), connection))
      else:
        connection.close()
  if len(found) < expected:
    logging.warning("%d of %d other processes have not connected: when one of them dies, its "
                    "number may stay unknown", expected - len(found), expected)
  return found


def end(verdict: str) -> None:
  """Ends this process at once, with what to do."""
  print(f"error: {verdict}. This process stops with it: look at the output of the other one, then "
        "start all processes again with --resume to go on from the newest checkpoint",
        file=sys.stderr, flush=True)
  os._exit(1)
