"""Working folders of made-up runs."""

import json
from typing import NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from tpugraphs_jax import datasets
from tpugraphs_jax.data import folds
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.segments.family import HEAD_FOLDER
from tpugraphs_jax.train import checkpoint

MEASURED_HERE = "measured run times on cpu"
NAMES = ("bert_1", "bert_2", "resnet_1", "vgg <b>", "unet_1", "alex$net_{1")


def write_run(
  folder,
  *,
  seed=0,
  quality=1.0,
  rate=0.001,
  kind=datasets.SYNTHETIC,
  collection="tile:xla",
  sizes=tuple(range(12, 18)),
):
  """A working folder whose scores follow the runtimes, from `quality` 0 (at random) to 1."""
  rng = np.random.default_rng(seed)
  runtime = [rng.permutation(n) + 5 for n in sizes]
  scores = [quality * r + (1 - quality) * rng.permutation(len(r)) for r in runtime]
  config = {
    "seed": seed,
    "task": collection.partition(":")[0],
    "model": {"name": "MLP"},
    "train": {"best_metric": "opa"},
    "optimizer": {"learning_rate": rate},
    "data_root": str(folder),
  }
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps({"config": config}))
  rows = [
    {"step": s, "train/loss": 1 / s, "valid_sample/opa_pooled": 1 - 0.5 / s} for s in (1, 2, 3)
  ]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"st')
  write_scores(folder, NAMES[: len(sizes)], runtime, scores)
  best = {"step": 3, "value": 0.8, "metric": "valid_sample/opa_pooled"}
  training = {"ended": "last epoch (3)", "step": 3, "seconds": 2.5, "best": best}
  judged = {"split": "valid", "graphs": len(sizes), "configurations": "all"}
  judged["configurations_judged"] = sum(sizes)
  summary = {"collection": collection, "labels": kind, "training": training, "validation": judged}
  (folder / "summary.json").write_text(json.dumps(summary))
  return folder


def metrics(folder):
  """The rows of the metrics, without the speed: nothing else may differ between equal runs."""
  rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  return [{name: row[name] for name in row if name != "steps_per_second"} for row in rows]


def several_runs(folder):
  """Two configs with three seeds each, the second one better."""
  return [
    write_run(folder / name / str(seed), seed=seed, quality=quality, rate=rate)
    for name, quality, rate in (("a", 0.2, 0.001), ("b", 0.9, 0.01))
    for seed in range(3)
  ]


def write_scores(folder, names, runtime, scores, has_order=None):
  np.savez(
    folder / "validation_scores.npz",
    graphs=np.array(names),
    nodes=np.arange(len(names)) * 1000 + 7,
    has_order=np.full(len(names), True) if has_order is None else has_order,
    sizes=[len(r) for r in runtime],
    config_ids=np.concatenate([np.arange(len(r)) for r in runtime]),
    labels=np.concatenate(runtime),
    scores=np.concatenate(scores).astype(np.float32),
  )


def write_fold(folder, fold, taus, *, seed=0, rate=0.001):
  """A run on three folds of nine kernels; a tau of 1 orders a kernel right, -1 in reverse."""
  write_run(folder, seed=seed, rate=rate)
  change_config(folder, data={"folds": 3, "fold": fold})
  summary = json.loads((folder / "summary.json").read_text())
  summary |= {"folds": 3, "test": summary["validation"] | {"split": "test"}}
  (folder / "summary.json").write_text(json.dumps(summary))
  fold_of = {f"train/g{number}": number % 3 for number in range(9)}
  folds.Division(3, {"tile:xla": fold_of}).write(folder / folds.FILE, fold)
  names = [f"g{number}" for number in range(9) if number % 3 == fold][: len(taus)]
  runtime = [np.arange(5, 12)] * len(taus)
  write_scores(folder, names, runtime, [tau * runtime[0] for tau in taus])
  (folder / "validation_scores.npz").rename(folder / "test_scores.npz")
  return folder


def move(run, data_root):
  """Sets `data_root` in the config of a run."""
  change_config(run, data_root=str(data_root))


def change_config(run, **fields):
  """Sets fields in the config of a run."""
  manifest = json.loads((run / "config.json").read_text())
  manifest["config"] |= fields
  (run / "config.json").write_text(json.dumps(manifest))


def newest_checkpoint(workdir):
  """The newest checkpoint of the last stage of a run; None without one."""
  segments = Config.from_dict(model_file.config_of(workdir)).segments
  folder = HEAD_FOLDER if segments and segments.finetune.epochs else ""
  return newest_of(workdir / folder / checkpoint.FOLDER)


class Saved(NamedTuple):
  """Step and parameters to evaluate of a checkpoint."""

  step: int
  params: dict


def newest_of(folder):
  """The newest checkpoint of a folder, as Orbax and JSON read it; None without one."""
  number = lambda path: int(path.name.removeprefix("save_"))
  newest = max(folder.glob("save_*[0-9]"), key=number, default=None)
  if newest is None:
    return None
  notes = json.loads((newest / "notes" / "metadata").read_text())
  with ocp.StandardCheckpointer() as reader:
    shapes = reader.metadata(newest / "state")
    shapes = getattr(shapes, "item_metadata", shapes)
    shapes = getattr(shapes, "tree", shapes)
    state = reader.restore(
      newest / "state", jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    )
  average = optax.tree.get(state["opt_state"], "average_params")
  params = state["params"] if average is None else average
  return Saved(notes["step"], params)
