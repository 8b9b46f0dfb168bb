"""Keeps what Orbax logs and prints out of a run's output."""

from __future__ import annotations

import errno
import logging
import os
import sys
from types import TracebackType

_LATE = "Event loop is closed"
_FULL = os.strerror(errno.ENOSPC)


class _OrbaxFilter(logging.Filter):
  """Lets no message of Orbax through: what goes wrong is raised as well."""

  def filter(self, record: logging.LogRecord) -> bool:
    is_orbax = "/orbax/" in record.pathname.replace("\\", "/")
    return not is_orbax


def quiet() -> None:
  """Orbax logs dozens of lines per checkpoint through absl's logger."""
  logger = logging.getLogger("absl")
  if not any(isinstance(item, _OrbaxFilter) for item in logger.filters):
    logger.addFilter(_OrbaxFilter())
  if not isinstance(sys.excepthook, _Hook):
    sys.excepthook = _Hook(sys.excepthook)


def reason(error: BaseException) -> str:
  """What an error of Orbax says, in one line; a full disk comes wrapped in pages of settings."""
  if _FULL in str(error):
    return _FULL
  return (str(error).splitlines() or [type(error).__name__])[0]


class _Hook:
  """Leaves out what threads of TensorStore print when several writes of a checkpoint fail.

  The first one is raised and ends the event loop, to which the others then report in vain.
  """

  def __init__(self, previous):
    self._previous = previous

  def __call__(
      self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
  ) -> None:
    if not (kind is RuntimeError and str(error) == _LATE):
      self._previous(kind, error, trace)
