"""Work beside a block goes on while it runs, and ends with it."""

import threading
import time

import pytest

from tpugraphs_jax.repeated import repeated


def test_work_is_done_again_and_again_in_a_thread_of_that_name_until_the_block_ends():
  calls, enough = [], threading.Event()

  def work():
    calls.append(threading.current_thread().name)
    if len(calls) == 3:
      enough.set()

  with repeated(work, 0.001, name="beside"):
    assert enough.wait(10)
  done = len(calls)
  assert set(calls) == {"beside"} and "beside" not in {t.name for t in threading.enumerate()}
  time.sleep(0.02)
  assert len(calls) == done


def test_a_block_that_is_over_before_the_first_wait_does_no_work_and_raises_what_it_raises():
  calls = []
  with pytest.raises(KeyError):
    with repeated(lambda: calls.append(1), 60, name="beside"):
      raise KeyError("x")
  assert calls == []
