"""One network for several collections: turns, steps, results, refused options."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import shutil

import commands
import jax
import numpy as np
import parts
import pytest
import composed_cases

from tpugraphs_jax import parallel
from tpugraphs_jax.data import features, npz, synthetic
from tpugraphs_jax.rankers import base
from tpugraphs_jax.run import job as job_lib, training
from tpugraphs_jax.serve.ranker import Ranker
from tpugraphs_jax.train import state as state_lib

ALSO = ("tile:xla", "layout:nlp:default")
NAMES = ("layout:xla:random", *ALSO)
OPTIONS = dict(op_embed_dim=3, pre_widths=(4,), widths=(4,), missing="layout", node_layout=True)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
  return synthetic.generate(
      tmp_path_factory.mktemp("data"), collections=NAMES, limit=4, progress=False)


def snapshot(folder):
  """The bytes of all files and when they were written."""
  return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
          for path in folder.rglob("*") if path.is_file()}


def job_of(data_root, store, **fields):
  return job_lib.Job.of(parts.config_of("layout", "preset=fifth_all,ci", **{
      "data_root": str(data_root), "data.store_dir": str(store), "data.also": ALSO} | fields))


# The network.


def without_rows(params, *gone):
  """Parameters of a network without some rows of its first kernel, `(from, to)` each."""
  params = jax.tree.map(np.asarray, params)
  join = params["inputs"]["join"]["JoinedDense_0"]
  rows = np.concatenate([np.arange(*part) for part in gone])
  return params | {"inputs": params["inputs"] | {"join": {"JoinedDense_0": {
      "kernel": np.delete(join["kernel"], rows, axis=0), "bias": join["bias"]}}}}


def test_for_programs_it_is_the_network_without_tiles():
  batch = composed_cases.layout_batch(("node_layout",), hops=1)
  joint = base.create_network("layout", "Composed", both_kinds=True, **OPTIONS)
  params = composed_cases.random_params(joint, batch)
  rows = params["inputs"]["join"]["JoinedDense_0"]["kernel"].shape[0]
  alone = base.create_network("layout", "Composed", **OPTIONS)
  np.testing.assert_array_equal(
      joint.apply({"params": params}, batch),
      alone.apply({"params": without_rows(params, (rows - 24, rows))}, batch))


def test_for_kernels_layouts_of_minus_one_stand_for_configurations():
  batch = composed_cases.tile_batch(("node_layout",))
  joint = base.create_network("tile", "Composed", both_kinds=True, **OPTIONS)
  params = composed_cases.random_params(joint, batch)
  # The same inputs as node features and logarithms of tiles, for a network of tiles alone.
  feat = np.asarray(batch.graph.nodes["feat"])
  nodes = batch.graph.nodes | {
      "feat": np.concatenate([feat[:, :-6], np.full((len(feat), 18), -1, np.float32), feat[:, -6:]],
                             axis=1)}
  given = batch._replace(graph=batch.graph._replace(nodes=nodes),
                         config_feat=np.log1p(np.maximum(batch.config_feat, 0)))
  first, embedded = feat.shape[1] - 6, OPTIONS["op_embed_dim"] + 6
  moved = jax.tree.map(np.asarray, params)
  kernel = moved["inputs"]["join"]["JoinedDense_0"]["kernel"]
  own = first + embedded
  moved["inputs"]["join"]["JoinedDense_0"]["kernel"] = np.concatenate(
      [kernel[:first], kernel[own : own + 18], kernel[first:own], kernel[own + 18 :]])
  alone = base.create_network("tile", "Composed", **OPTIONS | {"missing": "zero"})
  found = joint.apply({"params": params}, batch)
  np.testing.assert_allclose(
      np.where(batch.config_mask, found, 0),
      np.where(batch.config_mask, alone.apply({"params": moved}, given), 0), rtol=2e-5, atol=2e-5)


# The turns.


class Plan:
  """A plan whose budgets state its number and the step."""

  def __init__(self, number, steps):
    self.steps_per_epoch, self.budgets, self._number = steps, [{"nodes": number}], number

  def budget(self, step):
    return {"nodes": self._number, "step": step}


@pytest.mark.parametrize("each", [(3,), (1, 1), (2, 5, 1), (4, 7)])
def test_every_epoch_has_an_epoch_of_each_collection_in_an_order_of_its_own(each):
  turns = training.Turns([Plan(n, steps) for n, steps in enumerate(each)], seed=3)
  assert turns.steps_per_epoch == sum(each) and len(turns.budgets) == len(each)
  orders = []
  for epoch in range(3):
    steps = range(epoch * sum(each), (epoch + 1) * sum(each))
    found = [turns.turn(step) for step in steps]
    own = collections.defaultdict(list)
    for which, number in found:
      own[which].append(number)
    assert {n: list(range(epoch * count, (epoch + 1) * count)) for n, count in enumerate(each)} == own
    assert [turns.budget(step) for step in steps] == [
        {"nodes": which, "step": number} for which, number in found]
    orders.append([which for which, _ in found])
  again = training.Turns([Plan(n, steps) for n, steps in enumerate(each)], seed=3)
  assert [again.turn(s)[0] for s in range(sum(each))] == orders[0]  # in any process
  if sum(each) > 5:
    other = training.Turns([Plan(n, steps) for n, steps in enumerate(each)], seed=4)
    assert [other.turn(s)[0] for s in range(sum(each))] != orders[0] != orders[1]


# The steps.


def test_every_step_is_that_of_its_collection(data_root, tmp_path):
  job = job_of(data_root, tmp_path / "store")
  prepared = job_lib.prepare(job, tmp_path, resume=False)
  phase = training.first_stage(training.parts_of(job, prepared), tmp_path)
  transforms = [part.ranker.features.transforms for part in (job, *job.also)]
  for name, transform in transforms[0].items():
    assert all(found[name] is transform for found in transforms)
  state, plain = parallel.replicate(phase.state), parallel.replicate(phase.state)
  steps = phase.epochs * phase.plan.steps_per_epoch
  optimizer = state_lib.create_optimizer(total_steps=steps, **job.config.optimizer)
  sides = []
  for part in training.parts_of(job, prepared):
    plan = training.plan_of(part, epochs=phase.epochs)
    sides.append((iter(training.source_of(part, plan, steps=steps)),
                  training.make_step(part.config, part.family.network, optimizer)))
  seen = set()
  for number in range(8):
    which, _ = phase.plan.turn(number)
    seen.add(which)
    state, metrics = phase.train_step(state, next(phase.batches))
    batches, step = sides[which]
    plain, expected = step(plain, next(batches))
    np.testing.assert_array_equal(metrics["loss"], expected["loss"])
  assert len(seen) == 3 and int(parallel.unreplicate(state).step) == 8
  jax.tree.map(np.testing.assert_array_equal, parallel.unreplicate(state.params),
               parallel.unreplicate(plain.params))


def test_two_processes_make_the_batches_of_one(data_root, tmp_path, monkeypatch):
  job = job_of(data_root, tmp_path / "store")
  prepared = job_lib.prepare(job, tmp_path, resume=False)
  # Batches do not depend on the network.
  monkeypatch.setattr(training, "init_params", lambda *args, **kwargs: {"none": np.zeros(1)})
  monkeypatch.setattr(training, "make_step", lambda *args, **options: None)
  monkeypatch.setattr(training, "_check_same_shapes", lambda *args: None)
  first = lambda: list(itertools.islice(training.first_stage(training.parts_of(job, prepared), tmp_path).batches, 12))
  whole, halves = first(), []
  monkeypatch.setattr(parallel, "local_device_count", lambda: 2)
  for process in range(2):
    monkeypatch.setattr(parallel, "process_index", lambda process=process: process)
    halves.append(first())
  assert {type(batch).__name__ for batch in whole} == {"TileBatch", "LayoutBatch"}
  for batch, *parts in zip(whole, *halves):
    jax.tree.map(lambda all_, *some: np.testing.assert_array_equal(np.concatenate(some), all_),
                 batch, *parts)


# The command.


@pytest.fixture(scope="module")
def ran(data_root, tmp_path_factory):
  """A run, and one that was stopped and resumed."""
  folder = tmp_path_factory.mktemp("runs")
  command = lambda name, *flags, **more: commands.Run(
      ["run_layout.py", "--config=configs/layout.py:preset=fifth_all,ci", f"--data_root={data_root}",
       f"--config.data.also={ALSO}", f"--config.data.store_dir={folder / 'store'}",
       "--config.train.log_every_steps=1", f"--workdir={folder / name}", *flags], **more)
  ended = commands.run_all([
      command("whole"), command("stopped", stop_at_step=7), command("stopped", "--resume"),
      command("whole", "--mode=evaluate")], home=folder / "home")
  assert [end.code for end in ended] == [0, 143, 0, 0], [end.err for end in ended]
  return folder, ended


def test_every_collection_has_its_results(ran, data_root):
  folder, (whole, *_, again) = ran
  assert whole.page["task"] == f"layout, collection {NAMES[0]}"
  assert all(re.search(rf"; [1-4] graphs of {name}", whole.page["training"]) for name in ALSO)
  for name in NAMES:
    assert sum(line.startswith(f"{name}: ") for line in whole.told) == 2  # judged, ranked
    assert sum(line.startswith(f"{name}: ") for line in again.told) == 1
  place = folder / "whole/also/tile_xla"
  ranker = Ranker.load(place)
  kernel = npz.read_tile(npz.split_files(data_root, "tile:xla", "test")[0])
  order, scores = ranker.rank(kernel)
  assert ranker.collection.name == "tile:xla" and len(order) == len(kernel.configs)
  programs = Ranker.load(folder / "whole/also/layout_nlp_default")
  assert programs.collection.name == "layout:nlp:default"
  jax.tree.map(np.testing.assert_array_equal, ranker.params, programs.params)
  assert np.isfinite(scores).all() and kernel.name in (place / "results.csv").read_text()


def test_a_run_that_goes_on_ends_like_one_that_was_never_stopped(ran):
  folder, _ = ran
  files = ["model.npz", "results.csv", "validation.csv", "features.json"]
  places = [".", "also/tile_xla", "also/layout_nlp_default"]
  for name in (f"{place}/{file}" for place in places for file in files):
    assert (folder / "stopped" / name).read_bytes() == (folder / "whole" / name).read_bytes(), name


def test_changed_transforms_of_another_collection_are_refused(ran, data_root, tmp_path):
  folder, _ = ran
  workdir, name = shutil.copytree(folder / "whole", tmp_path / "whole"), "also/tile_xla/features.json"
  found = features.load(workdir / name)
  first, transform = next(iter(found.items()))
  found[first] = dataclasses.replace(transform, scale=2 * transform.scale)
  features.save(workdir / name, found)
  config = job_of(data_root, folder / "store").config
  before = snapshot(workdir)
  for mode in ({"mode": "evaluate"}, {"mode": "train", "resume": True}):
    with pytest.raises(ValueError, match=name):
      training.run(config, workdir, **mode)
  assert snapshot(workdir) == before  # refused before anything is written


def test_transforms_that_are_missing_are_fitted_again_and_no_others_are_written(
    ran, data_root, tmp_path):
  folder, _ = ran
  workdir, name = shutil.copytree(folder / "whole", tmp_path / "whole"), "also/tile_xla/features.json"
  before = snapshot(workdir)
  (workdir / name).unlink()
  job = job_of(data_root, folder / "store")
  prepared = job_lib.prepare(job, workdir, resume=True)
  found = snapshot(workdir)
  assert found[name][0] == before[name][0]
  assert {path for path in found if found[path] != before[path]} == {name, "config.json"}
  assert prepared.files.keys() == {
      "features.json", name, "also/layout_nlp_default/features.json"}


@pytest.mark.parametrize("variants", ["official,ci", "tables,ci", "full,ci"])
def test_other_rankers_train_on_several_layout_collections(variants, data_root, tmp_path):
  job = job_lib.Job.of(parts.config_of("layout", variants, **{
      "data_root": str(data_root), "data.store_dir": str(tmp_path / "store"),
      "data.also": ("layout:nlp:default",)}))
  phase = training.first_stage(training.parts_of(job, job_lib.prepare(job, tmp_path, resume=False)), tmp_path)
  # One transform of configurations: a network is not told their collection.
  first, second = (part.ranker.transforms for part in (job, *job.also))
  assert first.keys() == second.keys()
  for name, transform in first.items():
    jax.tree.map(np.testing.assert_array_equal, transform.to_dict(), second[name].to_dict())
  state = parallel.replicate(phase.state)
  for _ in range(4):
    state, metrics = phase.train_step(state, next(phase.batches))
  assert np.isfinite(parallel.unreplicate(metrics)["loss"])


# What is refused.


@pytest.mark.parametrize("variants, also, complaint", [
    ("xla-random,preset=fifth_all", ("layout:xla:random",), "different collections"),
    ("xla-random,preset=fifth_all", ("tile:xla", "tile:xla"), "different collections"),
    ("xla-random,preset=fifth_all", ("layout:xla",), "unknown collection"),
    ("xla-random,preset=fifth", ("tile:xla",), "inputs for tiles"),
    ("xla-random,tables", ("tile:xla",), "inputs for tiles"),
    ("xla-random,preset=gst", ("layout:xla:default",), "one collection"),
])
def test_impossible_collections_are_refused_by_name(variants, also, complaint):
  with pytest.raises(ValueError, match=complaint):
    job_lib.Job.of(parts.config_of("layout", variants, **{"data.also": also}))


@pytest.mark.parametrize("changes", [
    {"encoding": "gain"}, {"missing": "zero"}, {"fusion": "late"},
    {"dimension_encoder": "transformer"}])
def test_inputs_for_both_kinds_go_with_some_options_alone(changes):
  for kind in ("tile", "layout") if "fusion" not in changes else ("tile",):
    with pytest.raises(ValueError, match="both_kinds"):
      base.create_network(kind, "Composed", both_kinds=True, **OPTIONS | changes)


def test_collections_whose_parameters_differ_are_refused(data_root, tmp_path):
  job = job_of(data_root, tmp_path / "store")
  job.also[0].ranker.config["data"]["config_transform"] = "minmax"  # leaves out columns
  prepared = job_lib.prepare(job, tmp_path, resume=False)
  with pytest.raises(ValueError, match="parameters"):
    training.first_stage(training.parts_of(job, prepared), tmp_path)
