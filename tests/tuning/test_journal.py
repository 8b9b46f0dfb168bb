import json

import pytest

from tpugraphs_jax.tuning.journal import add_error, done, interrupted, Journal

_HEADER = {"source": "a.py:b", "seed": 0}


def test_a_journal_is_read_again_and_a_line_that_was_cut_short_is_dropped(tmp_path):
  path = tmp_path / "a.jsonl"
  journal = Journal(path, _HEADER)
  journal.start(0)
  journal.result(0, {"cycles": 3})
  journal.start(1)
  journal.error(1, "no")
  journal.close()
  path.write_bytes(path.read_bytes() + b'{"candidate": 2, "ra')
  again = Journal(path, _HEADER)
  assert again.raw == {0: {"cycles": 3}} and again.errors == {1: "no"}
  again.result(2, {"cycles": 4})
  again.close()
  assert done(path) == 3
  assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_journal_names_the_candidate_that_was_begun_and_not_ended(tmp_path):
  path = tmp_path / "a.jsonl"
  journal = Journal(path, _HEADER)
  assert interrupted(path) is None
  journal.start(4)
  assert interrupted(path) == 4
  journal.result(4, {})
  assert interrupted(path) is None
  journal.close()


def test_a_journal_of_something_else_is_refused(tmp_path):
  path = tmp_path / "a.jsonl"
  Journal(path, _HEADER).close()
  with pytest.raises(ValueError, match="seed"):
    Journal(path, _HEADER | {"seed": 1})


def test_a_damaged_line_is_refused_with_its_file_and_number(tmp_path):
  path = tmp_path / "a.jsonl"
  journal = Journal(path, _HEADER)
  journal.result(0, {"cycles": 3})
  journal.close()
  whole = path.read_bytes()
  for old, new in ((b'"cycles": 3', b'"cycles": 2'), (b"cycles", b"cyclas")):
    path.write_bytes(whole.replace(old, new))
    with pytest.raises(ValueError, match=r"a\.jsonl.* line 2"):
      Journal(path, _HEADER)
  path.write_bytes(whole.replace(b'"checksum"', b'"checksun"'))
  with pytest.raises(ValueError, match=r"a\.jsonl.* line 1"):
    Journal(path, _HEADER)


def test_a_module_is_used_again_as_long_as_it_is_the_one_that_was_kept(tmp_path):
  path = tmp_path / "a.jsonl"
  journal = Journal(path, _HEADER)
  assert journal.kept_module(tmp_path / "a.hlo.pb") is None
  journal.keep_module(tmp_path / "a.hlo.pb", b"module")
  assert journal.kept_module(tmp_path / "a.hlo.pb") == b"module"
  journal.close()
  again = Journal(path, _HEADER)
  assert again.kept_module(tmp_path / "a.hlo.pb") == b"module"
  for damaged in (b"modulf", b"modul", b""):
    (tmp_path / "a.hlo.pb").write_bytes(damaged)
    assert again.kept_module(tmp_path / "a.hlo.pb") is None
  again.close()


def test_a_journal_is_not_written_through_a_link(tmp_path):
  (tmp_path / "precious").write_text("kept")
  (tmp_path / "a.jsonl").symlink_to(tmp_path / "precious")
  with pytest.raises(ValueError, match="a link to"):
    Journal(tmp_path / "a.jsonl", _HEADER)
  with pytest.raises(ValueError, match="a link to"):
    add_error(tmp_path / "a.jsonl", 0, "no")
  assert (tmp_path / "precious").read_text() == "kept"
