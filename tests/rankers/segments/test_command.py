"""Graph Segment Training by the command, and its variants.

`tests/faults` resumes runs on segments.
"""

from typing import NamedTuple

import numpy as np
import pytest

from tests.support import commands, parts
from tests.support.run_folders import metrics
from tpugraphs_jax import synthetic

SMALL = [
  "--config.model.hidden_dim=8",
  "--config.train.epochs=3",
  "--config.train.log_every_steps=1",
]
SEGMENTS = [*SMALL, "--config.segments.finetune.epochs=2"]


class Runs(NamedTuple):
  """The folder and the ends of all runs of this file."""

  folder: object
  ended: dict[str, commands.Ended]

  def rows(self, name: str) -> list[dict]:
    return metrics(self.folder / name)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  folder = tmp_path_factory.mktemp("done")
  data_root = synthetic.generate(
    folder / "synthetic", collections=["layout:xla:random"], progress=False
  )

  def run(name, *flags, variant="gst_efd", small=SEGMENTS):
    config = f"--config=configs/layout.py:xla-random,{variant},ci"
    places = f"--data_root={data_root}", f"--workdir={folder / name}"
    return commands.Run(["run_layout.py", config, *small, *places, *flags])

  # Adam divides by the size of a gradient; a large epsilon keeps it from enlarging the rounding.
  plain = "--do=train", "--config.optimizer.eps=0.1"
  uncut = "--config.segments.max_nodes=5000"
  runs = {
    "whole": run("whole"),
    "other_table": run("whole", "--resume", "--config.segments.max_nodes=50"),
    "uncut": run("uncut", *plain, uncut, variant="gst_ed", small=SMALL),
    "graphs": run("graphs", *plain, variant="full", small=SMALL),
    "fresh": run("fresh", "--config.segments.fresh=9"),
  }
  return Runs(folder, dict(zip(runs, commands.run_all(list(runs.values()), home=folder / "home"))))


def losses(rows):
  return [row["train/loss"] for row in rows if "train/loss" in row]


def test_all_phases_run_and_rank(done):
  assert done.ended["whole"].code == 0, done.ended["whole"].err
  assert len(losses(done.rows("whole"))) == 12 and len(losses(done.rows("whole/head"))) == 8
  results = (done.folder / "whole" / "results.csv").read_text().splitlines()
  assert len(results) == 1 + 2
  assert "history table of" in done.ended["whole"].out
  assert "between segments" in done.ended["whole"].out


def test_programs_below_the_size_are_trained_whole(done):
  """One segment is the program: the same steps as without segments, but for rounding."""
  for name in ("uncut", "graphs"):
    assert done.ended[name].code == 0, done.ended[name].err
  uncut, graphs = losses(done.rows("uncut")), losses(done.rows("graphs"))
  np.testing.assert_allclose(uncut[:3], graphs[:3], rtol=1e-5)
  np.testing.assert_allclose(uncut, graphs, rtol=2e-3)


@pytest.mark.parametrize(
  "name, complaint",
  [
    ("other_table", "segments.max_nodes is 60 there and 50 here"),
    ("fresh", "--config.segments.fresh is 9, but"),
  ],
)
def test_segments_that_do_not_fit_the_data_end_before_training(done, name, complaint):
  assert done.ended[name].code == 2
  assert complaint in done.ended[name].complaint
  assert not (done.folder / name / "metrics.jsonl").exists()


@pytest.mark.parametrize(
  "variant, uses_history",
  [("gst", False), ("gst_e", True), ("gst_ed", True), ("gst_efd", True), ("one", False)],
)
def test_variants_have_a_table_where_they_need_one(variant, uses_history):
  made = parts.config_of("layout", f"xla-random,{variant},ci")
  assert made.segments.uses_history == uses_history
  assert bool(made.segments.finetune.epochs) == (variant == "gst_efd")


def test_segments_are_the_default_of_graphsage_alone():
  default, named = (parts.config_of("layout", name) for name in ("xla-random", "xla-random,gst_ed"))
  assert (default.segments.max_nodes, named.segments.max_nodes) == (5000, 1000)
  assert default == named.replace(segments__max_nodes=5000) and default.segments.keep == 0.5
  for variant in ("full", "official", "tables", "recommended", "preset=first"):
    assert parts.config_of("layout", f"nlp-default,{variant}").task == "layout"
