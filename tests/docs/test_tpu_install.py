"""The CI step that installs libtpu: when it is skipped, and when it must not be."""

import sys

import pytest
import tpu_install


@pytest.mark.parametrize("said, expected", [
    ("ERROR: Could not find a version that satisfies the requirement libtpu==0.0.4",
     "ERROR: Could not find a version that satisfies the requirement libtpu==0.0.4"),
    ("a\nERROR: No matching distribution found for libtpu\n",
     "ERROR: No matching distribution found for libtpu"),
    ("error: subprocess-exited-with-error\nsetup.cfg is broken", None), ("", None)])
def test_only_a_libtpu_that_is_not_to_be_had_is_a_reason_to_skip(said, expected):
  assert tpu_install.skip_reason(said) == expected


def test_a_skip_says_why_and_a_failure_fails(monkeypatch, capsys):
  monkeypatch.delenv(tpu_install.PYTHON, raising=False)
  monkeypatch.setattr(tpu_install, "environment", lambda folder: "no wheel of libtpu")
  tpu_install.main()
  assert capsys.readouterr().out == "skipped: libtpu is not to be had here: no wheel of libtpu\n"


def test_a_step_that_does_not_compile_fails(monkeypatch, tmp_path):
  # An environment of which nothing can be imported but what this one has.
  class Ended:
    returncode, stdout, stderr = 0, "", ""

  out = tmp_path / "figures.json"
  rows = {f"{name}/train/v3": {"devices": 8, "estimated_cycles": 5, "memory_mib": 2., "core_gib": 16}
          for name in tpu_install._CASES}  # pylint: disable=protected-access

  def figures(changed):
    out.write_text(tpu_install.json.dumps(rows | {"tile, small/train/v3": changed}))
  monkeypatch.setattr(tpu_install, "run", lambda *command: Ended)
  for changed, said in (({"error": "refused"}, "not compiled"),
                        (rows["tile, small/train/v3"] | {"devices": 1}, "tile, small")):
    figures(changed)
    with pytest.raises(SystemExit, match=said):
      tpu_install.check(sys.executable, out)
