"""Versions of tokamax, from a repository that is made here."""

import json
import subprocess

import pytest

from benchmarks.tokamax_history import Entry, History

_CACHE = "tokamax/data/autotuning/tpu7x/pallas_x.json"
_NEW, _OLD = {"q": "bf16[8]", "group_sizes": {"num_groups": 2}}, {"q": "bf16[8]"}
_OLD = _OLD | {"group_sizes": [3, 5], "precision": "DEFAULT"}


@pytest.fixture
def repository(tmp_path):
  """Makes commits of a cache in a new repository."""
  folder = tmp_path / "clone"
  folder.mkdir()
  subprocess.run(["git", "init", "-q", folder], check=True)

  def commit(day, text, kernel=""):
    path = folder / _CACHE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    (folder / "tokamax" / "kernel.py").write_text(kernel)
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    command = ["git", "-C", folder, *names, "commit", "-qm", day]
    date = f"{day}T12:00:00Z"
    subprocess.run(command, check=True, env={"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date})

  commit.folder = folder
  return commit


def _cache(*entries):
  return {json.dumps(key): {"{}": {"evaluation_times_ms": times}} for key, times in entries}


def test_an_entry_is_that_of_the_first_version_with_its_times(repository):
  repository("2026-01-01", _cache((_OLD, [1.0, 2.0])), "first")
  repository("2026-02-01", "no JSON", "broken")
  repository("2026-03-01", _cache((_NEW, [1.0, 2.0]), ({"q": "bf16[9]"}, [3.0])), "renamed")
  history = History(repository.folder)
  entry = history.entry("tpu7x", "pallas_x", json.dumps(_NEW), "{}", [1.0, 2.0])
  assert entry == Entry(entry.commit, "2026-01-01", json.dumps(_OLD), "{}")
  later = history.entry("tpu7x", "pallas_x", '{"q": "bf16[9]"}', "{}", [3.0])
  assert later.day == "2026-03-01" and later.commit != entry.commit
  place = repository.folder.parent
  for found, kernel in ((entry, "first"), (later, "renamed"), (entry, "first")):
    assert (history.unpack(found.commit, place) / "tokamax/kernel.py").read_text() == kernel


def test_times_of_other_arguments_or_later_versions_have_no_entry(repository):
  repository("2026-01-01", _cache((_OLD, [1.0])))
  repository("2026-07-17", _cache(({"q": "bf16[8]"}, [2.0])))
  history = History(repository.folder)
  assert history.entry("tpu7x", "pallas_x", '{"q": "bf16[16]"}', "{}", [1.0]) is None
  assert history.entry("tpu7x", "pallas_x", '{"q": "bf16[8]"}', "{}", [2.0]) is None
  assert history.entry("tpu7x", "pallas_x", json.dumps(_OLD), "{}", [4.0]) is None
  assert history.entry("tpu7x", "pallas_y", json.dumps(_OLD), "{}", [1.0]) is None


def test_a_folder_that_is_no_clone_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="no git repository"):
    History(tmp_path / "missing")
