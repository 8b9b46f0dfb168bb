"""A process that is gone is named once, to every process, and a farewell is no death."""

import json
import socket
import threading
import time

import pytest

from tpugraphs_jax.train import peers


@pytest.fixture
def watched():
  """Makes a watch of connections to others, and the others' ends of them."""
  made = []

  def make(names=("process 1",), *, silence_seconds=60.0):
    ends = [socket.socketpair() for _ in names]
    links = {number: peers.Link(here, name)
             for number, (name, (here, _)) in enumerate(zip(names, ends), 1)}
    verdicts, told = [], threading.Event()
    watch = peers.Watch(links, silence_seconds=silence_seconds,
                        end=lambda verdict: (verdicts.append(verdict), told.set()))
    watch.start()
    others = [there for _, there in ends]
    made.append((watch, others))
    return watch, others, verdicts, told
  yield make
  for watch, others in made:
    watch.farewell()
    for other in others:
      other.close()
    watch.join(timeout=10)
    assert not watch.is_alive()


def said(other, word):
  """Reads what was sent until a word comes."""
  data = b""
  other.settimeout(10)
  while word not in data:
    data += other.recv(4096)
  return data


def test_a_closed_connection_names_the_process_at_once(watched):
  _, (other,), verdicts, told = watched()
  started = time.monotonic()
  other.close()
  assert told.wait(10) and time.monotonic() - started < 5
  assert verdicts == ["process 1 is gone: its connection has closed"]


def test_a_process_that_says_nothing_is_named_after_its_time(watched):
  _, _, verdicts, told = watched(silence_seconds=1.5)
  assert not told.wait(0.5)
  assert told.wait(10)
  assert verdicts[0].startswith("process 1 stands still or cannot be reached: nothing came for ")


def test_signs_of_life_keep_a_process_alive(watched):
  watch, (other,), verdicts, _ = watched(silence_seconds=2.0)
  for _ in range(16):
    other.sendall(b"alive\n")
    time.sleep(0.25)
  assert watch.is_alive() and not verdicts
  assert said(other, b"alive\n").startswith(b"alive\n")  # it tells the same of itself


def test_a_farewell_is_no_death_and_the_last_one_ends_the_watch(watched):
  watch, others, verdicts, _ = watched(("process 1", "process 2"))
  others[0].sendall(b"ali")
  others[0].sendall(b"ve\nfarewell\n")
  others[0].close()
  time.sleep(1.5)
  assert watch.is_alive() and not verdicts
  others[1].sendall(b"farewell\n")
  watch.join(timeout=10)
  assert not watch.is_alive() and not verdicts


def test_what_process_0_notices_goes_to_all_others(watched):
  _, (first, second), verdicts, told = watched(("process 1", "process 2"))
  first.close()
  assert told.wait(10)
  heard = said(second, b"closed\n")
  assert b"gone process 1 is gone: its connection has closed\n" in heard


def test_what_process_0_tells_is_the_verdict(watched):
  _, (primary,), verdicts, told = watched(("process 0",))
  primary.sendall(b"gone process 3 is gone: its connection has closed\n")
  primary.close()
  assert told.wait(10)
  assert verdicts == ["process 3 is gone: its connection has closed"]


@pytest.fixture
def shared():
  """`share` of several threads that stand for processes: what the first one gives."""
  value, is_there = [], threading.Event()

  def share_of(index):
    def share(given):
      if index == 0:
        value.append(json.loads(json.dumps(given)))
        is_there.set()
      assert is_there.wait(10)
      return value[0]
    return share
  return share_of


def test_three_processes_connect_and_hear_of_a_death(shared, monkeypatch):
  verdicts, all_told = {}, threading.Barrier(4, timeout=20)

  def end(verdict):
    verdicts[threading.current_thread()] = verdict
    all_told.wait()
  monkeypatch.setattr(peers, "end", end)
  watches = {}

  def process(index):
    watches[index] = peers.start(index, 3, shared(index), host="localhost", silence_seconds=60)
  threads = [threading.Thread(target=process, args=(index,)) for index in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=20)
  assert len(watches) == 3 and all(watch.is_alive() for watch in watches.values())
  # Process 2 dies: its connection closes.
  link = watches[2]._links[0]
  link._connection.shutdown(socket.SHUT_RDWR)
  all_told.wait()
  found = {index: verdicts.pop(watch) for index, watch in watches.items()}
  assert found[0] == found[1] and found[0].startswith("process 2 of 3 (host ")
  assert found[0].endswith("is gone: its connection has closed")
  assert found[2].startswith("process 0 of 3 (host ")  # it sees its own end of it


def test_a_stranger_is_not_let_in(shared, monkeypatch, caplog):
  monkeypatch.setattr(peers, "_CONNECT_SECONDS", 1.0)
  address, is_open = [], threading.Event()

  def share(given):
    address.append(given[0])
    is_open.set()
    return given
  result = []
  thread = threading.Thread(target=lambda: result.append(
      peers.start(0, 2, share, host="localhost", silence_seconds=60)))
  thread.start()
  assert is_open.wait(10)
  with socket.create_connection(address[0]) as stranger:
    stranger.sendall(b"0123456789abcdef 1 77 elsewhere\n")
    thread.join(timeout=10)
  assert len(result) == 1 and "1 of 1 other processes have not connected" in caplog.text
  result[0].join(timeout=10)
  assert not result[0].is_alive()  # nobody to watch


def test_without_a_connection_the_run_goes_on(monkeypatch, caplog):
  monkeypatch.setattr(peers, "_CONNECT_SECONDS", 1.0)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = free.getsockname()  # nobody listens there
    found = peers.start(1, 2, lambda given: (address, "token", ("host", 7)), silence_seconds=60)
  assert found is None and "No connection to process 0" in caplog.text


def test_the_end_is_one_line_and_an_exit_code(monkeypatch, capfd):
  codes = []
  monkeypatch.setattr(peers.os, "_exit", codes.append)
  peers.end("process 1 of 2 (host a, process id 7) is gone: its connection has closed")
  (line,) = capfd.readouterr().err.splitlines()
  assert codes == [1] and line.startswith("error: process 1 of 2 (host a, process id 7) is gone")
  assert "--resume" in line
