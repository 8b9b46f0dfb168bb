"""The versions of tokamax in which the times of its autotuning caches were measured.

Kernels change, and so do the names of arguments in a cache, while its times stay. The history of
tokamax' repository tells when a time came into a cache, and with which arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import io
import json
from pathlib import Path
import subprocess
import tarfile
from typing import Any

from tpugraphs_jax.infra import trust

# Since this day tokamax needs Python 3.12 and a later jax.
_LATER_PYTHON = "2026-07-17"
# Arguments that later versions write in another way, for the same kernel.
_REWRITTEN = ("group_sizes", "precision", "residuals")


@dataclasses.dataclass(frozen=True)
class Entry:
  """An entry of a cache as it first was.

  Attributes:
    commit: the first one whose cache has the times.
    day: of the commit, such as `2026-02-28`.
    key: arguments as JSON.
    variant: configuration as JSON.
  """

  commit: str
  day: str
  key: str
  variant: str


class History:
  """The history of a clone of tokamax' repository.

  Raises:
    FileNotFoundError: the folder is no clone.
  """

  def __init__(self, clone: Path):
    self._clone = clone
    self._caches: dict[str, dict[str, list[Entry]]] = {}
    try:
      self._git("rev-parse", "--git-dir")
    except (OSError, subprocess.CalledProcessError):
      raise FileNotFoundError(
        f"--tokamax={clone} is no git repository, expected a clone of tokamax'"
      ) from None

  def entry(
    self, device: str, operation: str, key: str, variant: str, times: Sequence[float]
  ) -> Entry | None:
    """The first entry with some times.

    Args:
      device: folder of the cache, such as `tpu7x`.
      operation: name of the cache.
      key: arguments that the cache has now.
      variant: configuration that the cache has now.
      times: that were measured.

    Returns:
      None where the history has no such times, or only a version that needs a later Python.
    """
    path = f"tokamax/data/autotuning/{device}/{operation}.json"
    if path not in self._caches:
      self._caches[path] = self._first_entries(path)
    entries = self._caches[path].get(json.dumps(list(times)), [])
    same = [entry for entry in entries if _arguments(entry.key) == _arguments(key)]
    same = [entry for entry in same if entry.variant == variant] or same
    return same[0] if same and same[0].day < _LATER_PYTHON else None

  def unpack(self, commit: str, folder: Path) -> Path:
    """Writes the package of a commit into a folder, and returns its place for `sys.path`."""
    place, part = folder / f"tokamax-{commit}", folder / f"tokamax-{commit}.part"
    if not place.exists():
      archive = self._git("archive", commit, "tokamax")
      with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        package.extractall(part, filter="data")
      part.rename(place)  # of a run that was stopped, only the part is left
    return place

  def _first_entries(self, path: str) -> dict[str, list[Entry]]:
    """By times as JSON the entries of the first commit whose cache has them."""
    log = self._git("log", "--reverse", "--format=%h %cs", "--", path).decode()
    found: dict[str, list[Entry]] = {}
    for commit, day in map(str.split, log.splitlines()):
      try:
        cache = trust.parse(self._git("show", f"{commit}:{path}"))
      except (subprocess.CalledProcessError, ValueError):
        continue  # a commit that deletes the cache, or one whose cache was broken
      for key, row in cache.items():
        for variant, measured in row.items():
          entries = found.setdefault(json.dumps(measured["evaluation_times_ms"]), [])
          if not entries or entries[0].commit == commit:
            entries.append(Entry(commit, day, key, variant))
    return found

  def _git(self, *arguments: str) -> bytes:
    command = ["git", "-C", str(self._clone), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _arguments(key: str) -> dict[str, Any]:
  """The arguments of a key that all versions write in the same way."""
  return {name: value for name, value in json.loads(key).items() if name not in _REWRITTEN}
