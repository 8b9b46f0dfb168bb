"""The data pipeline, training, scores and files of the official code, number by number."""

from __future__ import annotations

import functools
import os
from pathlib import Path
import tempfile
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import numpy as np
import pytest

from tests.support import official_records, parts, random_graphs
from tpugraphs_jax import metrics
from tpugraphs_jax.data import npz, plan
from tpugraphs_jax.data.batching import Slate, total_sizes
from tpugraphs_jax.rankers import model_file, official_weights
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.run import official
from tpugraphs_jax.train import evaluation, training
from tpugraphs_jax.train.step import TrainState

RECORDS = official_records.RECORDS
LOSS_STEPS, WEIGHT_STEPS = 30, 20  # later steps may leave the path by float32 rounding
TOLERANCE = 1e-6
SCORE_TOLERANCE = 5e-6  # relative to the largest score

of_inputs = pytest.mark.parametrize(
  "record", [record for record in RECORDS if record.is_inputs], ids=lambda record: record.path.stem
)
of_runs = pytest.mark.parametrize(
  "record", [record for record in RECORDS if record.is_run], ids=lambda record: record.path.stem
)


def test_there_are_records_of_known_kinds():
  if not official_records.FOLDER.is_dir():
    pytest.skip(f"no folder {official_records.FOLDER}")
  assert RECORDS, f"no .npz in {official_records.FOLDER}"
  unknown = [record.path for record in RECORDS if record.is_inputs == record.is_run]
  assert not unknown


def _folder() -> Path:
  """An empty folder that is there until the last test has ended."""
  return Path(tempfile.mkdtemp(dir=os.environ["TPUGRAPHS_TESTS_SHARED"]))


class Prepared(NamedTuple):
  """The data of a record as a run prepares it."""

  data_root: Path
  experiment: parts.Experiment  # with fitted transforms
  raw: dict[str, dict[str, Any]]  # graphs as they are read, by split and name
  graphs: dict[str, dict[str, Any]]  # in the order of the run


@functools.cache
def prepared(record: official_records.Record) -> Prepared:
  folder = _folder()
  data_root = record.data_root(folder / "npz")
  changes = record.changes() | {"data_root": str(data_root)}
  if record.kind == "layout":
    changes["data.store_dir"] = str(folder / "store")
  experiment = parts.make(record.kind, record.variant, **changes)
  (folder / "run").mkdir()
  train, valid = experiment.load_graphs(folder / "run")
  raw = {split: experiment.data.load(split) for split in ("train", "valid")}
  graphs = {"train": train, "valid": valid}
  if npz.files_there(data_root, record.collection, "test"):
    raw["test"] = experiment.data.load("test")
    graphs["test"] = experiment.prepare(raw["test"])
  named = lambda splits: {
    split: {graph.name: graph for graph in graphs} for split, graphs in splits.items()
  }
  return Prepared(data_root, experiment, named(raw), named(graphs))


def assert_same(found, expected):
  assert found.dtype == expected.dtype
  np.testing.assert_array_equal(found, expected)


def sorted_edges(edges: np.ndarray) -> np.ndarray:
  return edges[np.lexsort((edges[:, 1], edges[:, 0]))]


# Inputs.


@of_inputs
def test_inputs_and_labels_are_those_of_the_official_code_bit_for_bit(record):
  data = prepared(record)
  assert set(data.graphs["train"]) == set(record["train/names"].tolist())
  for split in ("train", "valid", "test"):
    part = lambda key: record[f"{split}/{key}"]
    for number, name in enumerate(part("names").tolist()):
      piece = lambda key, ranges: part(key)[slice(*part(ranges)[number : number + 2])]
      graph = data.graphs[split][name]
      assert_same(graph.feat, piece("node_feat", "node_ranges"))
      np.testing.assert_array_equal(graph.opcode, piece("opcode", "node_ranges"))
      np.testing.assert_array_equal(
        graph.edge_index, sorted_edges(piece("edge_index", "edge_ranges"))
      )
      assert_same(random_graphs.config_runtime(graph.configs), piece("runtime", "config_ranges"))
      compare = tile_configs_match if record.kind == "tile" else layout_configs_match
      compare(record, data, split, number, graph)


def tile_configs_match(record, data, split, number, graph):
  part = slice(*record[f"{split}/config_ranges"][number : number + 2])
  transform, label = data.experiment.ranker.family.config_transform, record[f"{split}/label"][part]
  assert_same(transform(graph.configs.config_feat), record[f"{split}/config_feat"][part])
  assert_same(graph.configs.normalizer_ns, record[f"{split}/normalizer"][part])
  assert_same(graph.configs.labels, label)
  targets = data.experiment.data.targets(graph.configs, np.arange(len(graph.configs)))
  assert_same(targets, label.astype(np.float32))


def layout_configs_match(record, data, split, number, graph):
  name, configs = graph.name, graph.configs
  nodes = slice(*record[f"{split}/config_node_ranges"][number : number + 2])
  config_node = data.raw[split][name].config_node
  np.testing.assert_array_equal(config_node, record[f"{split}/node_config_ids"][nodes])
  rows = data.experiment.ranker.family.config_transform(configs.rows)
  ids = record[f"{split}/{name}/cfg_ids"]
  assert_same(rows[configs.row_id(ids)], record[f"{split}/{name}/cfg_feat"])
  targets = data.experiment.data.targets(configs, np.arange(len(configs)))
  assert_same(targets, record[f"{split}/{name}/label"])


@pytest.mark.parametrize(
  "record",
  [record for record in RECORDS if record.is_inputs and record.kind == "tile"],
  ids=lambda record: record.path.stem,
)
def test_the_mlp_has_the_official_widths(record):
  data = prepared(record)
  experiment = parts.make("tile", "MLP", **record.changes())
  experiment.ranker.use_transforms(data.experiment.ranker.transforms, where="")
  shapes = experiment.ranker.param_shapes(data.raw["train"][record["train/names"][0]])
  columns = record["train/node_feat"].shape[1] + record["train/config_feat"].shape[1]
  assert shapes["head"]["Dense_0"]["kernel"].shape == (32 + columns, 64)
  assert shapes["op_embedding"]["table"]["embedding"].shape[1] == 32


# Training.


def slate_of(data: Prepared, split: str, given: official_records.Slate) -> Slate:
  """A slate of the record, with the target that a run computes."""
  graph = data.graphs[split][given.name]
  targets = data.experiment.data.targets(graph.configs, given.config_ids)
  assert_same(targets, given.labels.astype(np.float32))
  return Slate(graph, given.config_ids, targets, block=given.block)


@functools.cache
def batches_of(record: official_records.Record) -> list[Any]:
  """The first recorded batches, assembled as in a run."""
  data = prepared(record)
  batch, family = data.experiment.config.batch, data.experiment.ranker.family
  steps = [[slate_of(data, "train", given) for given in step] for step in record.steps[:LOSS_STEPS]]
  (budget,) = plan.choose_budgets(
    [total_sizes([slate.graph for slate in step]) for step in steps], max_budgets=1
  )
  return [
    family.assemble(step, budget, graphs=batch.graphs, configs=batch.configs) for step in steps
  ]


@of_runs
def test_epochs_and_validation_have_the_official_sizes(record):
  data = prepared(record)
  config, (train, valid) = (
    data.experiment.config,
    (list(data.graphs[split].values()) for split in ("train", "valid")),
  )
  batch_plan = data.experiment.plan(train, epochs=1)
  assert batch_plan.steps_per_epoch == record.meta["steps_per_epoch"]
  graphs = training.sample_graphs(config, valid)
  ids, others = (training.sample_ids(config, graphs, step) for step in (1, 2))
  assert len(graphs) == len(record["valid_names"])
  assert {(len(numbers), len(set(numbers.tolist()))) for numbers in ids} == {
    (config.batch.configs,) * 2
  }
  assert any((np.sort(numbers) != np.sort(rest)).any() for numbers, rest in zip(ids, others))
  assert {given.name for step in record.steps for given in step} <= set(data.graphs["train"])


@pytest.mark.parametrize(
  "record",
  [record for record in RECORDS if "first_batch/n_node" in record.arrays],
  ids=lambda record: record.path.stem,
)
def test_the_first_batch_is_the_official_one_bit_for_bit(record):
  batch = batches_of(record)[0]
  expected = lambda name: record[f"first_batch/{name}"]
  nodes, edges = len(expected("op")), len(expected("edges"))
  np.testing.assert_array_equal(batch.graph.n_node[:-1], expected("n_node"))
  assert_same(batch.graph.nodes["feat"][:nodes], expected("feat"))
  np.testing.assert_array_equal(batch.graph.nodes["opcode"][:nodes], expected("op"))
  found = np.stack([batch.graph.receivers, batch.graph.senders], axis=1)[:edges]
  np.testing.assert_array_equal(sorted_edges(found), sorted_edges(expected("edges")))
  assert_same(batch.config_feat.reshape(expected("cfg").shape), expected("cfg"))


@of_runs
def test_losses_and_weights_follow_the_official_ones_step_by_step(record):
  data = prepared(record)
  config, network = data.experiment.config, data.experiment.ranker.family.network
  with_table = network.clone(opcodes=len(record.weights(0)[0]))
  optimizer = config.optimizer.create(len(record["loss"]))
  step = training.make_step(config, with_table, optimizer, jax.devices()[:1])
  params = official_weights.params_from_official(with_table, record.weights(0))
  state = parts.replicate(TrainState.create(params, optimizer), 1)
  order = official_weights.weight_order(with_table)
  for number, batch in enumerate(batches_of(record), start=1):
    state, found = step(state, jax.tree.map(lambda leaf: leaf[None], batch))
    loss = float(found["loss"][0])
    assert loss == pytest.approx(record["loss"][number - 1], rel=TOLERANCE), f"step {number}"
    if number in record.weight_steps and number <= WEIGHT_STEPS:
      flat = traverse_util.flatten_dict(
        jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.params)
      )
      for path, weight in zip(order, record.weights(number), strict=True):
        what = f"{'/'.join(path)} after step {number}"
        np.testing.assert_allclose(flat[path], weight, rtol=0, atol=TOLERANCE, err_msg=what)


# Scores and files.


@functools.cache
def converted(record: official_records.Record) -> tuple[Path, Prepared]:
  """A working folder made by the command from the last recorded weights, evaluated and ranked."""
  data, folder = prepared(record), _folder()
  np.savez(folder / "weights.npz", *record.weights(record.weight_steps[-1]))
  arguments = [
    f"--config={record.kind}.py:{record.variant}",
    f"--weights={folder / 'weights.npz'}",
    f"--data_root={data.data_root}",
    f"--out={folder / 'out'}",
    *(f"--set={field}={value!r}" for field, value in record.changes().items()),
  ]
  if record.kind == "layout":
    arguments.append(f"--set=data.store_dir={folder / 'store'}")
  assert official.main(arguments) == 0
  config = Config.from_dict(model_file.config_of(folder / "out"))
  config = config.replace(data_root=str(data.data_root))
  if record.kind == "layout":
    config = config.replace(data__store_dir=str(folder / "store"))
  training.run(config, folder / "out", do=["evaluate", "predict"], split="valid")
  return folder, data


@of_runs
def test_a_model_from_official_weights_scores_all_configurations_as_there(record):
  folder, data = converted(record)
  judged = {
    scored.name: scored
    for scored in evaluation.read_scores(folder / "out" / "validation_scores.npz")
  }
  assert set(judged) == set(data.graphs["valid"])
  largest = np.abs(record["valid_scores"]).max()
  for given, expected in zip(record.valid, record["valid_scores"], strict=True):
    graph = judged[given.name]
    np.testing.assert_array_equal(graph.config_ids, np.arange(len(graph.labels)))
    assert np.abs(graph.scores[given.config_ids] - expected).max() <= SCORE_TOLERANCE * largest
  pairs = [
    metrics.ordered_pairs(scores, given.labels.astype(np.float32))
    for given, scores in zip(record.valid, record["valid_scores"])
  ]
  assert metrics.pooled_opa(pairs) == pytest.approx(record["valid_loss_opa"][1], abs=1e-7)


@of_runs
def test_the_csv_file_ranks_all_configurations_as_the_official_scores_do(record):
  folder, data = converted(record)
  header, *lines, end = (folder / "out" / "results_valid.csv").read_text().split("\n")
  assert (header, end) == ("ID,TopConfigs", "")
  judged = {
    scored.name: scored
    for scored in evaluation.read_scores(folder / "out" / "validation_scores.npz")
  }
  expected = {}
  for name, graph in sorted(judged.items()):
    scores = graph.scores.tolist()
    order = sorted(range(len(scores)), key=lambda config: (scores[config], config))
    expected[f"{record.collection}:{name}"] = order
  assert lines == [f"{row}," + ";".join(map(str, order)) for row, order in expected.items()]
  room = 2 * SCORE_TOLERANCE * np.abs(record["valid_scores"]).max()
  for given, scores in zip(record.valid, record["valid_scores"]):
    there = dict(zip(given.config_ids.tolist(), scores.tolist()))
    ranked = [
      there[config] for config in expected[f"{record.collection}:{given.name}"] if config in there
    ]
    assert len(ranked) == len(there) and np.diff(ranked).min() >= -room  # equal ones in file order
