"""Keeps what Orbax logs and prints out of a run's output."""

from __future__ import annotations

from collections.abc import Callable
import errno
import logging
import os
import sys

_LATE = "Event loop is closed"
_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]


class _OrbaxFilter(logging.Filter):
  """Lets no message of Orbax or of its tasks through: what goes wrong is raised as well."""

  def filter(self, record: logging.LogRecord) -> bool:
    is_of_task = record.name == "asyncio" and "/orbax/" in str(record.msg)  # names its file
    return not is_of_task and "/orbax/" not in record.pathname.replace("\\", "/")


def quiet() -> None:
  """Orbax logs dozens of lines per checkpoint, and asyncio its tasks that failed."""
  for name in ("absl", "asyncio"):
    logger = logging.getLogger(name)
    if not any(isinstance(item, _OrbaxFilter) for item in logger.filters):
      logger.addFilter(_OrbaxFilter())
  if not isinstance(sys.unraisablehook, _Hook):
    sys.unraisablehook = _Hook(sys.unraisablehook)


def reason(error: BaseException) -> str:
  """What an error of Orbax says, in one line; a full disk comes wrapped in pages of settings."""
  for full in _FULL:
    if full in str(error):
      return full
  return (str(error).splitlines() or [type(error).__name__])[0]


class _Hook:
  """Leaves out what threads of TensorStore print when several writes of a checkpoint fail.

  The first one is raised and ends the event loop, to which the others then report in vain.
  """

  def __init__(self, previous: Callable[[sys.UnraisableHookArgs], object]):
    self._previous = previous

  def __call__(self, told: sys.UnraisableHookArgs) -> None:
    if not (told.exc_type is RuntimeError and str(told.exc_value) == _LATE):
      self._previous(told)
