"""Train, evaluate and predict: what `run_tile.py` and `run_layout.py` do."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from logging import getLogger
from pathlib import Path
import sys
import time
from typing import NoReturn

from absl import app, flags, logging
import jax
from ml_collections import config_flags
import ml_collections
import numpy as np

from tpugraphs_jax import evaluate as evaluate_lib
from tpugraphs_jax import ranking
from tpugraphs_jax.data import synthetic
from tpugraphs_jax.data.batching import PreparedGraph
from tpugraphs_jax.graph import DEFAULT_DATA_ROOT, OpGraph
from tpugraphs_jax.tasks.task import Phase, Task
from tpugraphs_jax.train import loop, parallel, report

MODES = ("train", "evaluate", "predict", "all")


def define_flags(default_config: str) -> None:
  """The flags of both commands.

  Args:
    default_config: config file used when `--config` is not given.
  """
  config_flags.DEFINE_config_file("config", default_config, "Config file, as FILE.py:VARIANT.")
  flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results.")
  flags.DEFINE_string(
      "data_root", None, f"Folder with tile/ and layout/ (default {DEFAULT_DATA_ROOT}).")
  flags.DEFINE_enum("mode", "all", MODES, "What to do; later modes use what is in --workdir.")
  flags.DEFINE_boolean("resume", False, "Go on with the run in --workdir.")
  flags.DEFINE_string("coordinator_address", None, "host:port of process 0 of several.")
  flags.DEFINE_integer("num_processes", None, "Number of processes.")
  flags.DEFINE_integer("process_id", None, "Number of this process.")
  flags.mark_flag_as_required("workdir")


def main(argv: list[str]) -> None:
  """Runs the command; what a user can get wrong ends in one line and exit code 1 or 2."""
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; options start with --")
  values = flags.FLAGS
  try:
    for name in ("workdir", "data_root"):
      if "://" in (values[name].value or ""):
        raise ValueError(f"--{name}={values[name].value} is not a local folder: mount the bucket "
                         "(gcsfuse), or copy it here first")
    parallel.initialize(values.coordinator_address, values.num_processes, values.process_id)
    workdir = Path(values.workdir).expanduser()
    parallel.use_compilation_cache(workdir / "compilation_cache")
    # A process that fails alone must not leave the others waiting for it.
    with parallel.stop_together():
      run(_config(values, workdir), workdir, mode=values.mode, resume=values.resume)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).splitlines()[0].rstrip(".")
    _fail(f"{reason}; a step takes less with a smaller --config.batch.graphs, with "
          "--config.batch.config_chunk, or on segments (layouts: variant gst_ed)")
  except (ValueError, OSError, FloatingPointError) as error:
    _fail(str(error))


def _fail(message: str) -> NoReturn:
  logging.debug("details", exc_info=True)
  print(f"error: {' '.join(message.split())}", file=sys.stderr)
  sys.exit(2)


def _config(values: flags.FlagValues, workdir: Path) -> ml_collections.ConfigDict:
  """The config that the flags ask for, with the place of the data as `data_root`."""
  config, data_root = values.config, values.data_root
  if values.mode in ("evaluate", "predict"):
    # Process 0 decides: the others may have no such disk.
    saved = parallel.from_primary(
        ranking.saved_config(workdir).to_dict() if parallel.is_primary() else None)
    data_root = data_root or saved.get("data_root")
    if not values["config"].present:
      config = ml_collections.ConfigDict(saved)
      config.update_from_flattened_dict(config_flags.get_override_values(values["config"]))
  with config.unlocked():
    config.data_root = data_root or _default_data_root(workdir)
  return config


def _default_data_root(workdir: Path) -> str:
  """The usual place; where nothing is there, a tiny synthetic set in the working folder."""
  if parallel.from_primary(Path(DEFAULT_DATA_ROOT).expanduser().is_dir()):
    return DEFAULT_DATA_ROOT
  root = workdir / "synthetic"
  print(f"No data set at {DEFAULT_DATA_ROOT} and no --data_root: using tiny synthetic data in "
        f"{root}", flush=True)
  if parallel.is_primary():
    synthetic.generate(root, scale="tiny", progress=False)
  parallel.barrier("synthetic data")
  if not root.exists():  # a host with a disk of its own
    synthetic.generate(root, scale="tiny", progress=False)
  return str(root / "npz")


def run(
    config: ml_collections.ConfigDict, workdir: Path, *, mode: str = "all", resume: bool = False
) -> None:
  """One job; `config.data_root` names the data.

  Args:
    config: see `configs/`.
    workdir: folder for checkpoints, metrics and results.
    mode: one of `MODES`.
    resume: go on with the run in `workdir`.
  """
  if mode in ("train", "all"):
    train(ranking.create_task(config), workdir, resume=resume)
  if mode == "train":
    return
  ranker = ranking.Ranker(workdir, config)
  if mode in ("evaluate", "all"):
    evaluate(ranker)
  if mode in ("predict", "all"):
    predict(ranker)


def train(task: Task, workdir: Path, *, resume: bool = False) -> loop.TrainResult:
  """Fits transforms, trains, keeps the best checkpoint by `config.train.best_metric`."""
  parallel.per_device(task.config.batch.graphs, field="--config.batch.graphs")
  loop.check_workdir(workdir, resume=resume, config=ranking.fingerprint(task.config))
  prepared, valid = _prepare(task, workdir, resume=resume)
  phase = task.first_phase(prepared, workdir)
  logging.info("%s: %d training graphs, %d validation graphs, %d steps per epoch",
               task.collection, len(prepared), len(valid), phase.steps_per_epoch)
  result = train_phase(task, phase, valid, workdir, resume=resume)
  while phase.following:
    phase = phase.following(result.state)
    result = train_phase(task, phase, valid, workdir, resume=resume)
  return result


def _prepare(
    task: Task, workdir: Path, *, resume: bool
) -> tuple[list[PreparedGraph], list[PreparedGraph]]:
  """Training and validation graphs with fitted transforms; the raw graphs are not kept."""
  config = task.config
  train_graphs = task.trainable(task.load(config.data_root, "train"))
  valid_graphs = task.judged(task.load(config.data_root, "valid"))
  if not valid_graphs:
    raise ValueError(f"no labelled validation graph of {task.collection} in {config.data_root}; "
                     "choosing the best checkpoint needs at least one")
  _fit_once(task, train_graphs, workdir / ranking.TRANSFORMS_FILE, resume=resume)
  report.write_manifest(workdir, config.to_dict())
  valid = [task.prepare(graph) for graph in valid_graphs]
  for graph in valid:
    task.validation_ids(graph)  # what is wrong with them shows before training
  return [task.prepare(graph) for graph in train_graphs], valid


def train_phase(
    task: Task, phase: Phase, valid: Sequence[PreparedGraph], workdir: Path, *, resume: bool
) -> loop.TrainResult:
  """Runs the training loop once, judged on the validation graphs."""
  config, ids = task.config, task.sampled_ids(valid)
  return loop.train(
      phase.state, train_step=phase.train_step, batches=phase.batches,
      evaluate=lambda params: task.validate(phase.scorer, params, valid, ids)[1],
      workdir=workdir / phase.folder, total_epochs=phase.epochs,
      steps_per_epoch=phase.steps_per_epoch,
      eval_every_epochs=config.train.eval_every_epochs,
      early_stop_epochs=config.train.early_stop_epochs, best_metric=config.train.best_metric,
      log_every_steps=config.train.log_every_steps,
      checkpoint_every_steps=config.train.checkpoint_every_steps,
      profile_steps=config.profile_steps, resume=resume, config=ranking.fingerprint(config))


def _fit_once(task: Task, graphs: Sequence[OpGraph], path: Path, *, resume: bool) -> None:
  """Fits the transforms; a run that goes on keeps those that it began with."""
  if parallel.from_primary(resume and path.exists()):
    task.load_transforms(path)
    return
  task.fit(graphs)
  if parallel.is_primary():
    path.parent.mkdir(parents=True, exist_ok=True)
    task.save_transforms(path)


def evaluate(ranker: ranking.Ranker) -> dict[str, float]:
  """Scores the validation split; writes validation.csv and prints the means."""
  task = ranker.task
  graphs = [task.prepare(g) for g in task.judged(task.load(task.config.data_root, "valid"))]
  if not graphs:
    print(f"{task.collection}: no labelled graph in the validation split; nothing to score")
    return {}
  ids = [task.validation_ids(graph) for graph in graphs]
  rows, means = task.validate(
      ranker.scorer, ranker.params(graphs[0]), graphs, ids, progress=True)
  if task.config.eval.get("time"):
    for row, graph, chosen in zip(rows, graphs, ids):
      row["seconds"] = _scoring_seconds(ranker, graph, chosen)
  if parallel.is_primary():
    evaluate_lib.write_csv(ranker.workdir / "validation.csv", rows)
    print(task.summary(rows, means), flush=True)
  return means


def _scoring_seconds(ranker: ranking.Ranker, graph: PreparedGraph, ids: np.ndarray) -> float:
  """Seconds to score these configurations of a graph, without compilation."""
  score = lambda: ranker.task.score(ranker.scorer, ranker.params(graph), [graph], [ids])
  score()
  started = time.monotonic()
  score()
  return time.monotonic() - started


def predict(ranker: ranking.Ranker) -> None:
  """Ranks the test split and writes results.csv in the form of a submission."""
  task = ranker.task
  graphs = [task.prepare(graph) for graph in task.load(task.config.data_root, "test")]
  rankings = task.rank(ranker.scorer, ranker.params(graphs[0]), graphs, progress=True)
  if parallel.is_primary():
    path = ranker.workdir / "results.csv"
    task.write_results(path, rankings)
    print(f"{task.collection}: ranked {len(rankings)} test graphs, wrote {path}", flush=True)


def launch(default_config: str) -> None:
  """Entry point of the commands."""
  # Which platforms jax looked for and did not find is of no use to anyone here.
  getLogger("jax._src.xla_bridge").setLevel("WARNING")
  app.run(main, flags_parser=functools.partial(_parse_flags, default_config))


def _parse_flags(default_config: str, argv: list[str]) -> list[str]:
  """As absl's own parser, but every mistake takes one line."""
  try:
    define_flags(default_config)
    for flag in flags.FLAGS.get_key_flags_for_module(__name__):
      flags.FLAGS.register_key_flag_for_module(argv[0], flag)  # for --help
    return flags.FLAGS(argv)
  except AttributeError as error:  # from ml_collections
    field = str(error).strip("\"'")
    given = next((arg for arg in argv if field in arg), "--config")
    sys.exit(f"error: {given}: the config has no field {field!r}")
  except flags.Error as error:  # of a config file the last line of a traceback
    sys.exit(f"error: {str(error).splitlines()[-1].removeprefix('ValueError: ')}")
  except OSError as error:  # the config file
    sys.exit(f"error: {' '.join(str(error).split())}")
