"""Numbers of the public code of published systems, and runs of our presets on their inputs.

`tests/data/systems/SYSTEM.npz` has the records of a system. Their keys begin with the name of the
record. Numbers of the public code are as they were recorded, at fewer nodes and configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from flax import traverse_util
import jax
import numpy as np
import pytest

from tests.support import parts, random_graphs, recorded
from tpugraphs_jax import losses
from tpugraphs_jax.data import batching
from tpugraphs_jax.data.batching import Slate
from tpugraphs_jax.infra import parallel
from tpugraphs_jax.nn.nodes import Nodes
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import loading

FOLDER = Path(__file__).parents[1] / "data/systems"
# Files have narrow types where they lose nothing.
_TYPES = {"float16": np.float32, "int32": np.int64}


def under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
  """Arrays whose keys begin with `prefix/`, by the rest of the key."""
  return {
    key.removeprefix(f"{prefix}/"): value
    for key, value in arrays.items()
    if key.startswith(f"{prefix}/")
  }


def arrays(system: str, prefix: str) -> dict[str, np.ndarray]:
  """Arrays of a file whose keys begin with `prefix/`, by the rest of the key."""
  with np.load(FOLDER / f"{system}.npz") as file:
    found = {key: file[key] for key in file.files if key.startswith(f"{prefix}/")}
  widened = {key: x.astype(_TYPES.get(x.dtype.name, x.dtype)) for key, x in found.items()}
  return under(widened, prefix)


class Record:
  """A record: arrays by key, and `settings`.

  Args:
    name: of the system and of the record, as `first/default`.
  """

  def __init__(self, name: str):
    system, _, record = name.partition("/")
    self.arrays = arrays(system, record)
    self.settings = json.loads(str(self.arrays["settings"]))

  def __getitem__(self, key: str) -> np.ndarray:
    return self.arrays[key]

  def __contains__(self, key: str) -> bool:
    return key in self.arrays

  def under(self, prefix: str) -> dict[str, np.ndarray]:
    """Arrays whose keys begin with `prefix/`, by the rest of the key."""
    return under(self.arrays, prefix)

  def names(self, prefix: str) -> list[str]:
    """The different next parts of keys below `prefix/`, in their order."""
    return list(dict.fromkeys(key.split("/")[0] for key in self.under(prefix)))


class Case:
  """A record beside a run of the preset on its inputs.

  A subclass is made of the name of a record and an empty folder.
  """

  record: Record
  experiment: parts.Experiment
  params: Any  # from the published weights
  batch: Any  # from the published inputs

  @functools.cached_property
  def run(self) -> Callable[[Any], Any]:
    """Compiled function from parameters to `((loss, (scores [G, C], layers)), gradients)`."""
    network = self.experiment.ranker.family.network

    def of(params, batch):
      scores, seen = network.apply(
        {"params": params}, batch, capture_intermediates=True, mutable=["intermediates"]
      )
      return loss_of(self.experiment, batch)(scores), (scores, seen["intermediates"])

    # A batch in the program would be a constant, from which XLA computes all that it can.
    run = jax.jit(jax.value_and_grad(of, has_aux=True))
    return lambda params: run(params, self.batch)

  @functools.cached_property
  def results(self) -> tuple[np.ndarray, float, dict, dict]:
    """Scores `[G, C]`, loss, gradients by path, and outputs of layers by path."""
    (loss, (scores, seen)), grads = self.run(self.params)
    layers = {
      "/".join(path[:-1]): value[0] for path, value in traverse_util.flatten_dict(seen).items()
    }
    return np.asarray(scores), float(loss), flat(grads), layers

  def of_nodes(self, layer: Any, nodes: np.ndarray, count: int) -> np.ndarray:
    """The output of a layer on some nodes in the first `count` configurations, `[C, nodes, F]`."""
    if isinstance(layer, Nodes):
      layer = parts.everywhere(layer)
    rows = np.reshape(layer, (len(layer), -1, layer.shape[-1]))
    rows = np.broadcast_to(rows, (len(rows), self.batch.config_mask.shape[1], rows.shape[-1]))
    return np.swapaxes(rows[nodes, :count], 0, 1)

  def update(
    self, grads: Mapping[str, np.ndarray], *, total_steps: int = 100, **changes: Any
  ) -> dict[str, np.ndarray]:
    """The first update of the parameters by path, with changed fields of the optimiser."""
    options = dataclasses.replace(self.experiment.config.optimizer, **changes)
    optimizer = self.experiment.ranker.family.constrain(options.create(total_steps))
    first = lambda grads, params: optimizer.update(grads, optimizer.init(params), params)[0]
    return flat(jax.jit(first)(tree(grads), self.params))


def fixture(case: Callable[[str, Path], Case]) -> Any:
  """A fixture of a module: the case of the record that a test is parametrized with."""

  @pytest.fixture(scope="module", name="case")
  def make(request, tmp_path_factory):
    return case(request.param, tmp_path_factory.mktemp("case"))

  return make


_DTYPES = {
  "node_feat": np.float32,
  "node_opcode": np.uint8,
  "node_config_feat": np.float32,
  "config_feat": np.float32,
}


def write_graph(folder: Path, name: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes released arrays as a released file `folder/name.npz`; others are left out."""
  kind = "tile" if "config_feat" in arrays else "layout"
  kept = {
    key: np.asarray(arrays[key], _DTYPES.get(key, np.int64))
    for key in recorded.MEMBERS[kind]
    if key in arrays
  }
  if kind == "layout":
    kept.setdefault("node_splits", np.array([[0, len(kept["node_opcode"])]]))
  folder.mkdir(parents=True, exist_ok=True)
  np.savez(folder / f"{name}.npz", **kept)


def run_of(
  variant: str,
  splits: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]],
  root: Path,
  **changes: Any,
) -> parts.Experiment:
  """An experiment with fitted transforms on graphs that are written as released files.

  Args:
    variant: of --config, such as `layout.py:xla-default,preset=second_xla`.
    splits: released arrays by split and name of a graph.
    root: an empty folder.
    **changes: of the config, by flat names (`**{"model.widths": (8, 8)}`).
  """
  config = configs.load(variant)
  if config.kind == "layout":
    changes = {"data.store_dir": str(root / "store")} | changes
  config = config.replace(**changes, data_root=str(root / "npz"))
  experiment = parts.Experiment(config)
  for split, graphs in splits.items():
    for name, arrays in graphs.items():
      write_graph(root / "npz" / experiment.data.collection.path / split, name, arrays)
  graphs = experiment.data.load("train")
  graphs = loading.trainable(experiment.data, graphs, min_configs=config.batch.min_configs)
  experiment.fit_transforms(graphs)
  return experiment


def batch_of(
  experiment: parts.Experiment,
  graphs: Sequence[Any],
  config_ids: Sequence[np.ndarray],
  targets: Sequence[np.ndarray] | None = None,
) -> Any:
  """The batch of one slate of each prepared graph.

  Args:
    experiment: of the graphs.
    graphs: prepared ones; a graph may come twice.
    config_ids: `[n]` int64 of each slate.
    targets: `[n]` of each; those of training unless given.
  """
  if targets is None:
    targets = [
      experiment.data.targets(graph.configs, ids) for graph, ids in zip(graphs, config_ids)
    ]
  slates = [
    Slate(graph, ids, target, number)
    for number, (graph, ids, target) in enumerate(zip(graphs, config_ids, targets))
  ]
  budget = random_graphs.common_budget([batching.total_sizes(graphs)])
  return experiment.ranker.family.assemble(
    slates, budget, graphs=len(slates), configs=max(map(len, config_ids))
  )


def tree(arrays: Mapping[str, np.ndarray]) -> Any:
  """Parameters from arrays by path, `{"sage_0/self/kernel": ...}`, in float32."""
  flat = {path: np.asarray(value, np.float32) for path, value in arrays.items()}
  return traverse_util.unflatten_dict(flat, sep="/")


def flat(params: Any) -> dict[str, np.ndarray]:
  """Arrays by path, the inverse of `tree`."""
  return jax.tree.map(np.asarray, traverse_util.flatten_dict(params, sep="/"))


def linear(weights: Mapping[str, np.ndarray], layers: Mapping[str, str]) -> dict[str, np.ndarray]:
  """Kernels and biases by path, from our names of linear layers to the published ones."""
  ours = {}
  for name, theirs in layers.items():
    ours[f"{name}/kernel"] = weights[f"{theirs}.weight"].T
    if f"{theirs}.bias" in weights:
      ours[f"{name}/bias"] = weights[f"{theirs}.bias"]
  return ours


def sage(
  weights: Mapping[str, np.ndarray], name: str, theirs: str, direction: str
) -> dict[str, np.ndarray]:
  """Parameters by path of a GraphSAGE layer, whose published bias is that of the means."""
  return {
    f"{name}/{direction}/kernel": weights[f"{theirs}.lin_l.weight"].T,
    f"{name}/self/bias": weights[f"{theirs}.lin_l.bias"],
    f"{name}/self/kernel": weights[f"{theirs}.lin_r.weight"].T,
  }


def loss_of(experiment: parts.Experiment, batch: Any) -> Any:
  """The training loss as a function of scores `[G, C]`, without penalties."""
  options = experiment.config.loss

  def on_device(scores):
    totals, counts = losses.loss_sums(
      options.weighted,
      scores,
      batch.target,
      where=batch.config_mask,
      key=jax.random.split(jax.random.key(0), len(scores)),
      options=options,
      axis=parallel.DEVICES,
    )
    return losses.combine(options.weighted, totals, counts)

  return jax.jit(lambda scores: jax.vmap(on_device, axis_name=parallel.DEVICES)(scores[None])[0])


def assert_near(actual: Any, expected: Any, tolerance: float, what: str = "") -> None:
  """Checks the largest difference against `tolerance` times the largest expected number."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  assert actual.shape == expected.shape, f"{what}: {actual.shape} for {expected.shape}"
  error = np.abs(actual - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
  assert error <= tolerance, f"{what}: {error:.2e} above {tolerance:.0e}"


def assert_torch_parameters(
  network: Any,
  batch: Any,
  fan_in: Mapping[str, int] = {},
  *,
  skip: Sequence[str] = (),
  **constants: float,
) -> dict[str, np.ndarray]:
  """Checks the distribution of initial parameters against PyTorch's formulas; returns them by path.

  A kernel `[K, F]` and the bias beside it are uniform on +-1 / sqrt(K), a table is normal, a norm
  has the scale 1 and the bias 0.

  Args:
    network: is initialised with three seeds; one layer of each kind is enough.
    batch: of it.
    fan_in: the K of layers or of single parameters that have another one, by path.
    skip: paths of parameters that begin in another way.
    **constants: expected value of parameters by the end of their path.
  """
  init = jax.jit(lambda seed: network.init(jax.random.key(seed), batch)["params"])
  runs = [flat(init(seed)) for seed in range(3)]
  for path in runs[0].keys() - set(skip):
    layer, _, last = path.rpartition("/")
    values = np.concatenate([run[path].ravel() for run in runs])
    constant = next((value for end, value in constants.items() if path.endswith(end)), None)
    if f"{layer}/scale" in runs[0]:
      np.testing.assert_array_equal(values, float(last == "scale"), err_msg=path)
    elif constant is not None:
      np.testing.assert_array_equal(values, constant, err_msg=path)
    elif last == "table":
      assert abs(values.std() - 1) < 5 / np.sqrt(len(values)), path
    else:
      inputs = fan_in.get(path) or fan_in.get(layer) or runs[0][f"{layer}/kernel"].shape[0]
      bound = 1 / np.sqrt(inputs)
      assert np.abs(values).max() <= bound, path
      if len(values) >= 30:
        assert abs(values.std() - bound / np.sqrt(3)) < 3 * bound / np.sqrt(len(values)), path
  return runs[0]
