"""One signal asks a run to stop; a second one ends the process, wherever it waits."""

import os
import signal
import subprocess
import sys

import commands
import pytest

from tpugraphs_jax.train import loop

# Each waits for ever in its own way, and says so first.
WAITS = {
    "a queue": "import queue; say(); queue.Queue().get()",
    # A mutex taken twice: a wait in C that no signal interrupts.
    "a call in C": ("import ctypes; lock = ctypes.create_string_buffer(64); c = ctypes.CDLL(None); "
                    "c.pthread_mutex_lock(lock); say(); c.pthread_mutex_lock(lock)"),
    "a thread": ("import threading; t = threading.Thread(target=threading.Event().wait, "
                 "daemon=True); t.start(); say(); t.join()"),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", WAITS)
def test_a_second_signal_ends_the_process_wherever_it_waits(where, number):
  program = ("from tpugraphs_jax.train import loop\n"
             "say = lambda: print('waiting', flush=True)\n"
             f"with loop.StopSignals():\n  {WAITS[where]}\n")
  process = subprocess.Popen(
      [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=commands.ROOT)
  try:
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    assert not ended(process, seconds=1)  # the first one alone is a request
    # Again and again: on a busy machine two signals can arrive as one.
    assert any(process.send_signal(number) or ended(process, seconds=1) for _ in range(30))
    assert process.returncode == 128 + number
  finally:
    process.kill()
    process.communicate()


def ended(process, *, seconds):
  try:
    return process.wait(timeout=seconds) is not None
  except subprocess.TimeoutExpired:
    return False


def test_one_signal_is_a_request():
  with loop.StopSignals() as signals:
    assert signals.received is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGTERM


def test_what_signals_did_before_is_put_back():
  wakeup = signal.set_wakeup_fd(-1)
  handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  for _ in range(2):
    with loop.StopSignals():
      os.kill(os.getpid(), signal.SIGTERM)
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
  assert signal.set_wakeup_fd(wakeup) == -1
