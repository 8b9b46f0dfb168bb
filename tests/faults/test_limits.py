"""Numbers at the limits of their types and little memory end in a line or in finite models."""

import shutil

import jax
import numpy as np
import pytest

from tests.support import commands, faults
from tpugraphs_jax.rankers import model_file

_LIMIT = np.iinfo(np.int64).max


def _runtimes_near_the_limit(arrays, split):
  arrays["config_runtime"] = _LIMIT - np.argsort(np.argsort(arrays["config_runtime"]))


def _larger_features_in_validation(arrays, split):
  if split == "valid":
    arrays["node_feat"][:, 21:60] = 3e38


_FAST = ("--config.optimizer.clip_norm=0", "--config.optimizer.learning_rate=1e38")
_ONE_STEP = ("--config.train.epochs=1", "--config.batch.slates_per_epoch=4")


@pytest.mark.parametrize(
  "change, flags",
  [
    (_runtimes_near_the_limit, ("--config.batch.target=ratio",)),
    (_larger_features_in_validation, ("--config.data.feature_transform=none",)),
    (None, _FAST),
    (None, (*_FAST, *_ONE_STEP)),
  ],
)
def test_numbers_at_their_limits_end_in_one_line_or_in_finite_models(
  change, flags, data_root, tmp_path
):
  shutil.copytree(data_root / "tile", tmp_path / "data/tile")
  for path in sorted((tmp_path / "data").rglob("*.npz")) if change else ():
    with np.load(path) as file:
      arrays = {name: file[name].copy() for name in file.files}
    change(arrays, path.parent.name)
    np.savez(path, **arrays)
  places = [f"--data_root={tmp_path / 'data'}", f"--workdir={tmp_path / 'run'}"]
  command = ["run_tile.py", "--config=configs/tile.py:ci", *faults.SHORT, *flags, *places]
  ended = faults.run(command, tmp_path / "home")
  assert "Traceback" not in ended.err and (not ended.code or "finite" in ended.complaint)
  if (tmp_path / "run/model.npz").exists():
    params = model_file.read(tmp_path / "run/model.npz").params
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert "inf" not in (tmp_path / "run/validation.csv").read_text() or ended.code


# A process ranks a program of the largest released size with 4 GiB of memory.
_RANK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
import jax, numpy as np
from benchmarks import workloads
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs

program = lambda **sizes: workloads.program(np.random.default_rng(0), **sizes)
graph = program(nodes=43_615, config_nodes=1_960, configs=int(sys.argv[2]))
ranker, rng = Ranker(configs.load(f"layout.py:xla-random,{sys.argv[1]}")), np.random.default_rng(0)
ranker.features.fit([graph])
ranker.fit_configs([graph.configs.rows])
shapes = ranker.param_shapes(program(nodes=400, config_nodes=40, configs=2))
ranker.params = jax.tree.map(lambda s: rng.normal(0, 0.1, s.shape).astype(s.dtype), shapes)
try:
  order, scores = ranker.rank(graph)
except (ValueError, OSError) as error:
  sys.exit(f"error: {error}")
assert np.isfinite(scores).all() and len(np.unique(order)) == len(graph.configs)
"""


@pytest.mark.parametrize("variant, configs, fits", [("tables", 7504, True), ("full", 64, False)])
def test_a_limit_on_memory_is_kept_or_named(variant, configs, fits, tmp_path):
  ended = commands.run(commands.Run(["-c", _RANK, variant, configs]), home=tmp_path)
  assert "Traceback" not in ended.err
  if fits:
    assert ended.code == 0, ended.err
  else:
    assert ended.code == 1 and "bytes" in ended.err.splitlines()[-1]
