"""One network for several layout collections: its graphs, its results, what is refused."""

from __future__ import annotations

import collections
import itertools

import jax
import numpy as np
import pytest

from tests.support import commands, parts
from tpugraphs_jax import synthetic
from tpugraphs_jax.data import npz, transforms
from tpugraphs_jax.rankers.ranker import Ranker

ALSO = ("layout:nlp:default", "layout:xla:default")
NAMES = ("layout:xla:random", *ALSO)
FOLDERS = ("also/layout_nlp_default", "also/layout_xla_default")


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
  return synthetic.generate(
    tmp_path_factory.mktemp("data"), collections=NAMES, limit=4, progress=False
  )


def experiment_of(data_root, store, variant="preset=fifth_all,ci", **fields):
  places = {"data_root": str(data_root), "data.store_dir": str(store)}
  return parts.make("layout", variant, **places | {"data.also": ALSO} | fields)


def train_graphs(experiment):
  return {data.collection.name: data.load("train") for data in experiment.collections}


def test_graphs_of_all_collections_are_drawn_by_the_root_of_their_configurations(
  data_root, tmp_path
):
  experiment = experiment_of(data_root, tmp_path / "store", **{"batch.slates_per_epoch": 200})
  prepared, _ = experiment.load_graphs(tmp_path)
  counts = [len(graph.configs) for graphs in train_graphs(experiment).values() for graph in graphs]
  assert [len(graph.configs) for graph in prepared] == counts
  plan = experiment.plan(prepared, epochs=1)
  drawn = collections.Counter()
  for step in range(plan.steps_per_epoch):
    for graphs in plan.graphs_of_step(step):
      drawn.update(graphs.tolist())
  share = np.sqrt(counts) / np.sqrt(counts).sum() * sum(drawn.values())
  assert all(abs(drawn[number] - expected) <= 1 for number, expected in enumerate(share))


@pytest.mark.parametrize("variant", ["official,ci", "tables,ci"])
def test_transforms_are_fitted_on_all_collections_together(variant, data_root, tmp_path):
  experiment = experiment_of(data_root, tmp_path / "store", variant)
  experiment.load_graphs(tmp_path)
  graphs = list(itertools.chain(*train_graphs(experiment).values()))
  alone = experiment_of(data_root, tmp_path / "store", variant, **{"data.also": ()})
  alone.fit_transforms(graphs)
  for name, transform in alone.ranker.transforms.items():
    jax.tree.map(
      np.testing.assert_array_equal,
      transform.to_dict(),
      transforms.load(tmp_path / "features.json")[name].to_dict(),
    )


@pytest.fixture(scope="module")
def ran(data_root, tmp_path_factory):
  """A run, and one that was stopped and resumed."""
  folder = tmp_path_factory.mktemp("runs")
  arguments = [
    "run_layout.py",
    "--config=configs/layout.py:preset=fifth_all,ci",
    f"--data_root={data_root}",
    f"--config.data.also={ALSO}",
    f"--config.data.store_dir={folder / 'store'}",
    "--config.train.log_every_steps=1",
  ]
  command = lambda name, *flags, **more: commands.Run(
    [*arguments, f"--workdir={folder / name}", *flags], **more
  )
  runs = [command("whole"), command("stopped", stop_at_step=3), command("stopped", "--resume")]
  runs.append(command("whole", "--do=evaluate"))
  ended = commands.run_all(runs, home=folder / "home")
  assert [end.code for end in ended] == [0, 143, 0, 0], [end.err for end in ended]
  return folder, ended


def test_every_collection_is_judged_and_ranked(ran, data_root):
  folder, (whole, *_, again) = ran
  assert whole.page["task"] == f"learn to rank layouts of whole programs: collection {NAMES[0]}"
  assert all(name in whole.page["training"] for name in ALSO)
  for name in NAMES:
    assert sum(line.startswith(f"{name}: ") for line in whole.told) == 2  # judged, ranked
    assert sum(line.startswith(f"{name}: ") for line in again.told) == 1
  ranker = Ranker.load(folder / "whole")
  for name, place in zip(ALSO, FOLDERS):
    program = npz.read_layout(npz.split_files(data_root, name, "test")[0])
    order, scores = ranker.rank(program)
    assert np.isfinite(scores).all()
    ranked = (folder / "whole" / place / "results.csv").read_text()
    row = next(row for row in ranked.splitlines() if program.name in row)
    assert row.endswith(";".join(map(str, order)))


def test_a_run_that_goes_on_ends_like_one_that_was_never_stopped(ran):
  folder, _ = ran
  names = [
    "model.npz",
    "features.json",
    *(f"{place}/{file}" for place in (".", *FOLDERS) for file in ("results.csv", "validation.csv")),
  ]
  for name in names:
    assert (folder / "stopped" / name).read_bytes() == (folder / "whole" / name).read_bytes(), name
