"""The benchmark of shared and plain steps: same losses, one row per preset."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import commands
import numpy as np
import pytest

BENCHMARKS = commands.ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_preset_is_measured_in_both_forms_in_processes_of_their_own(tmp_path):
  command = [sys.executable, str(BENCHMARKS / "systems_step.py"), "--presets", "layout:second_xla",
             "--variants", "ci", "--graphs", "1", "--slate", "3", "--nodes", "30", "--repeats",
             "1", "--out", str(tmp_path / "steps.json"), "--table", str(tmp_path / "steps.md")]
  subprocess.run(command, check=True, capture_output=True,
                 env=os.environ | {"PYTHONPATH": str(commands.ROOT),
                                   "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
  row = json.loads((tmp_path / "steps.json").read_text())["layout:second_xla"]
  assert row["shared_loss"] == pytest.approx(row["plain_loss"], rel=1e-4)
  assert row["shared_configs"] == 3 and row["shared_nodes"] == 30 and row["step_s_ratio"] > 0
  assert 0 < row["planned_mib_ratio"] and row["plain_planned_mib"] < row["plain_peak_mib"]
  assert row["peak_mib_ratio"] == pytest.approx(row["shared_peak_mib"] / row["plain_peak_mib"])
  assert "`layout:second_xla`" in (tmp_path / "steps.md").read_text()


@pytest.mark.parametrize("kind", ["layout", "tile"])
def test_batches_hold_what_every_preset_reads(kind):
  import systems_step
  for preset in systems_step.PRESETS[kind]:
    model, _ = systems_step.model_of(kind, preset, "ci", "shared")
    plain, _ = systems_step.model_of(kind, preset, "ci", "plain")
    batch = systems_step.batch_of(kind, model, graphs=2, slate=3, nodes=12)
    assert batch.config_mask.shape == (2, 3) and batch.graph.n_node[:-1].tolist() == [12, 12]
    assert np.asarray(batch.graph.nodes["feat"]).shape[1] == 140 + sum(
        systems_step.inputs.READ_BLOCKS[name] for name in model.reads)
    assert plain.hops == 0 and type(plain) is type(model)


def test_a_form_that_failed_leaves_its_cells_empty(monkeypatch, capsys):
  import systems_step

  def run(script, *flags):
    if "plain" in flags:
      raise subprocess.CalledProcessError(-9, script)
    return {"step_s": 0.5, "planned_mib": 99.5, "peak_mib": 1234.5}

  monkeypatch.setattr(systems_step.timing, "in_subprocess", run)
  args = argparse.Namespace(graphs=1, slate=2, nodes=0, variants="", repeats=1)
  row = systems_step.compare(args, "tile", "first")
  assert row == {"shared_step_s": 0.5, "shared_planned_mib": 99.5, "shared_peak_mib": 1234.5}
  assert "tile first plain: ended with exit code -9" in capsys.readouterr().out
  assert systems_step.table({"tile:first": row}).splitlines()[-1] == (
      "| `tile:first` | - | 0.500 | - | - | 100 | - | - | 1,234 |")
