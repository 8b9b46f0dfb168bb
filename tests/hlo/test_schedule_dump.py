"""Where libtpu writes schedules."""

import os
from pathlib import Path

import pytest

from tpugraphs_jax.hlo import schedule_dump

_REPORT = "../g3     /platforms/xla/service/jellyfish/tool_data/vmem_report_{}.tmpl"


@pytest.mark.parametrize("version", ["0.0.34", "0.0.35", "0.0.23.1"])
def test_an_old_libtpu_finds_its_templates_beside_its_working_folder(
  version, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  for _ in range(2):
    schedule_dump.enter_working_folder(tmp_path, version)
    assert Path.cwd().parent == tmp_path
    assert os.path.isfile(_REPORT.format("header")) and os.path.isfile(_REPORT.format("footer"))


@pytest.mark.parametrize("version", ["0.0.37", "0.0.42.1", "0.1"])
def test_a_later_libtpu_keeps_the_working_folder(version, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  schedule_dump.enter_working_folder(tmp_path, version)
  assert Path.cwd() == tmp_path and not any(tmp_path.iterdir())
