"""Every preset takes training steps on tiny data, with products of the config's precision.

Each step also lowers for GPUs and TPUs, on a machine that has neither.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from benchmarks import ranker_steps
from tests.support import parts
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.rankers.config import SegmentOptions
from tpugraphs_jax.rankers.ranker import Ranker

# The networks of `second_nlp` and of `seventh`, and options of `mlsys21_fusion_work`.
_IN_OTHERS = (
  "preset=second_xla",
  "preset=gst",  # and in tests/rankers/systems/test_gst.py
  "preset=mlsys21_work",
  "preset=mlsys21_fusion",
)
PLATFORMS = ("cuda", "tpu")
COLLECTIONS = ("xla-random", "xla-default", "nlp-random", "nlp-default")


@pytest.mark.parametrize(
  "kind, name",
  [
    (kind, name)
    for kind in ("layout", "tile")
    for name in parts.presets(kind)
    if name not in _IN_OTHERS and not name.endswith("_all")  # these are in test_together
  ],
)
def test_a_preset_takes_training_steps(kind, name, data_root, tmp_path):
  store = {"data.store_dir": str(tmp_path / "store")} if kind == "layout" else {}
  config = parts.config_of(kind, f"{name},ci", data_root=str(data_root), **store)
  experiment = parts.Experiment(config)
  graphs, _ = experiment.load_graphs(tmp_path)
  state, step, iterator, _ = experiment.begin(graphs, tmp_path)
  before = jax.tree.map(np.asarray, state.params)
  state, batches = parallel.replicate(state), [next(iterator) for _ in range(2)]
  if config.task != "segments":  # whose steps are in test_precision and test_lowering
    # One trace for all platforms, of the mapped function without the change of the mesh.
    traced = jax.jit(step.func.__wrapped__).trace(*step.args, state, batches[0])
    traced.lower(lowering_platforms=PLATFORMS)
    lowered = traced.lower()
    found = ranker_steps.products(lowered)
    assert config.model.precision == "highest" and set(found) == {"highest"}, found
    step = functools.partial(lowered.compile(), *step.args)
  for batch in batches:
    state, metrics = step(state, batch)
    assert np.isfinite(parallel.unreplicate(metrics)["loss"])
  after = parallel.unreplicate(state).params
  moved = [
    not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
  ]
  assert np.mean(moved) > 0.7 and all(np.isfinite(a).all() for a in jax.tree.leaves(after))


@pytest.mark.parametrize("variant", ["xla-default,preset=first", "xla-random,preset=third"])
def test_a_network_that_looks_further_than_a_segment_has_no_history(variant):
  changes = {"data.virtual_node": "none", "segments": SegmentOptions(keep=0.5)}
  config = parts.config_of("layout", variant, **changes)
  with pytest.raises(ValueError, match="history"):
    Ranker(config)


def test_presets_have_the_published_settings():
  """Settings of the published code and write-ups that presets once had wrong."""
  first = {c: parts.config_of("layout", f"{c},preset=first") for c in COLLECTIONS}
  assert [(c.batch.configs, c.eval.configs) for c in first.values()] == [
    (128, 512),
    (64, 128),
    (128, 512),
    (64, 256),
  ]
  assert [c.model.across_configs for c in first.values()] == [False, True, False, True]
  gst, seventh = (parts.config_of("layout", f"preset={name}") for name in ("gst", "seventh"))
  assert gst.task == "segments" and gst.segments.keep == 0.5 and gst.segments.max_nodes == 1000
  assert gst.segments.readout == "scalar" and seventh.segments == gst.segments
  assert (gst.model.activate_rounds, seventh.model.activate_rounds) == (False, True)
  slates = {c: parts.config_of("layout", f"{c},preset=sixth").batch.configs for c in COLLECTIONS}
  assert slates == {"xla-random": 100, "xla-default": 32, "nlp-random": 80, "nlp-default": 80}
  assert parts.config_of("layout", "preset=sixth").batch.graph_sampling == "every_config"
  tile = lambda name: parts.config_of("tile", f"preset={name}")
  layouts = (f"{source}-random,preset=second_{source}" for source in ("xla", "nlp"))
  for second in (tile("second_tile"), *(parts.config_of("layout", name) for name in layouts)):
    assert (second.data.duplicate_policy, second.data.config_transform) == ("min", "none")
  assert "directed_walk" in tile("third").data.features
  assert tile("third").data.virtual_node == "output"
  third = parts.config_of("layout", "preset=third")
  assert third.batch.graph_sampling == "every_config" and third.data.pad_value == 0
  assert third.data.virtual_node == "output"
  assert "wide_logarithms" in third.data.features and "released" not in third.data.features
  assert parts.config_of("layout", "preset=second_xla").data.leave_out == ("unet",)
  nlp = parts.config_of("layout", "nlp-random,preset=second_nlp")
  assert nlp.model.score_scale == 1e-3
  assert (nlp.optimizer.name, nlp.optimizer.eps, nlp.optimizer.clip_norm) == ("adamw", 1e-6, 100)
  assert nlp.model.widths == (256,) * 4 + (512,) * 4 and nlp.loss.score_norm_clip == 500


def test_the_sum_of_hinges_is_the_same_on_two_devices(data_root, tmp_path, monkeypatch):
  """Rounding of float32 sums is all that differs; in float64 the losses are equal to 1e-10."""
  store = {"data.store_dir": str(tmp_path / "store")}
  config = parts.config_of("layout", "preset=fourth,ci", data_root=str(data_root), **store)
  config = config.replace(loss=parts.config_of("layout", "preset=third").loss)
  experiment = parts.Experiment(config)
  graphs, _ = experiment.load_graphs(tmp_path)
  losses = []
  for devices in (1, 2):
    monkeypatch.setattr(parallel, "device_count", lambda: devices)
    monkeypatch.setattr(parallel, "local_device_count", lambda: devices)
    state, step, batches, _ = experiment.begin(graphs, tmp_path)
    state = jax.tree.map(lambda leaf: np.stack([leaf] * devices), state)
    _, metrics = step(state, next(batches))
    losses.append(float(metrics["loss"][0]))
  assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] > 1
