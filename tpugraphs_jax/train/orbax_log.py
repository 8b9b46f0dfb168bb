"""Keeps the log of Orbax out of a run's."""

import logging


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
