"""Carries out a command after its flags are parsed."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
from pathlib import Path
import tempfile

from absl import flags, logging

from tpugraphs_jax import config_fields, datasets, report, synthetic
from tpugraphs_jax.graph import DEFAULT_DATA_ROOT
from tpugraphs_jax.infra import console, files, parallel, trust
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ensemble, Ranker
from tpugraphs_jax.run import configs, dry_run
from tpugraphs_jax.train import results, training
from tpugraphs_jax.train.loading import data_of


def launch(values: flags.FlagValues, kind: str) -> None:
  """Carries out the command; a mistake of the user ends in one line and exit code 2.

  Args:
    values: of the flags.
    kind: of the configurations that the command ranks, `tile` or `layout`.
  """
  parallel.leave_out_missing_tpu()
  console.install()
  try:
    _check_kind(values.config.config, kind)
    if values.print_config:
      print(configs.listing(values.config.config, values.config.place))
      return
    advice = (
      "a step takes less with a smaller batch.graphs, with batch.config_chunk, or on segments "
      "(layouts: variant gst_ed)"
    )
    with (
      console.working(f"run_{kind}"),
      console.explaining_devices(),
      parallel.explaining_memory(advice),
    ):
      if values.dry_run:
        _dry_run(values)
        return
      _check_flags(values)
      with _working_folder(values) as workdir:
        if values.ensemble:
          _run_ensemble(values, workdir)
          return
        config, split = _config(values, workdir), values.split or ""
        training.run(config, workdir, do=values.do, resume=values.resume, split=split)
        if values.report and values.do != ["predict"]:
          parallel.primary_only(report.try_write)([workdir], workdir / report.FILE)
  except (ValueError, OSError, FloatingPointError, MemoryError) as error:
    logging.debug("details", exc_info=True)
    console.fail(configs.as_flags(configs.one_line(error), values.config.config))
  except KeyboardInterrupt:
    console.interrupted("a run that has begun is kept: go on with --resume")


@contextlib.contextmanager
def _working_folder(values: flags.FlagValues) -> Iterator[Path]:
  """The working folder of a run whose processes have joined."""
  _start(values)
  _use_compilation_cache(values.compilation_cache)
  # When one process fails, all stop: none waits for it.
  with parallel.stop_together(), files.working_folder(values.workdir) as workdir:
    yield workdir


def _use_compilation_cache(folder: str | None) -> None:
  """Keeps compiled programs in a folder, by default the user's; a user may have none."""
  try:
    parallel.use_compilation_cache(folder or files.cache() / "compiled")
  except ValueError as error:
    logging.warning(f"{error}; the run goes on without a cache of compiled programs")


def _dry_run(values: flags.FlagValues) -> None:
  """Prints the disk, memory and time of a run; writes only into a temporary folder."""
  _start(values)
  with parallel.stop_together(), tempfile.TemporaryDirectory() as scratch:
    config = values.config.config
    data_root = values.data_root or (
      _synthetic(config, Path(scratch) / "synthetic") if values.synthetic else DEFAULT_DATA_ROOT
    )
    for line in dry_run.lines(config.replace(data_root=data_root), Path(scratch)):
      console.say(line)


def _start(values: flags.FlagValues) -> None:
  """Sets XLA's flags of the config, and joins the processes; jax has computed nothing yet."""
  train = values.config.config.train
  if values.synthetic or train.quick_compile:
    parallel.compile_quickly()
  if train.deterministic:
    parallel.compute_deterministically()
  parallel.initialize(values.coordinator_address, values.num_processes, values.process_id)


def _check_kind(config: Config, kind: str) -> None:
  """Refuses (ValueError) a config of the other command."""
  if config.kind != kind:
    raise ValueError(
      f"the config ranks {config.kind}s, and this command {kind}s: run run_{config.kind}.py, which "
      f"an installation has as tpugraphs-{config.kind}"
    )


def _check_flags(values: flags.FlagValues) -> None:
  """Refuses (ValueError) flags that do not go together."""
  if not values.workdir:
    raise ValueError("--workdir is missing: name a folder for checkpoints, metrics and results")
  if values.synthetic and values.data_root:
    raise ValueError("--synthetic generates the data: give it or --data_root, not both")
  do = ",".join(values.do)
  for flag in ("split", "ensemble"):
    if getattr(values, flag) and "train" in values.do:
      raise ValueError(f"--{flag} goes with --do=evaluate or predict, and --do is {do}")
  if values.ensemble and values.synthetic:
    raise ValueError(
      "--ensemble takes the data of its first model, or --data_root: leave out --synthetic"
    )


def _with_overrides(values: flags.FlagValues, fields: dict) -> Config:
  """The config of a trained model with the changes of the flags.

  Only modules of the flag `extensions` are imported, none that the model names.
  """
  changes = values.config.changes
  config_fields.import_extensions(changes.get("extensions", ()))
  extensions, config = fields.get("extensions", ()), None
  if "train" not in values.do and trust.not_imported(extensions):
    # Losses are for training: a model whose modules have nothing else is used without them.
    with contextlib.suppress(ValueError):
      config = Config.from_dict({**fields, "loss": {}, "extensions": ()})
  if config is None:
    trust.check_imported(extensions)
    config = Config.from_dict(fields)
  _check_kind(config, values.config.config.kind)
  return config.replace(**changes)


def _config(values: flags.FlagValues, workdir: Path) -> Config:
  """The config of the run, with the folder of the data as `data_root`."""
  config, data_root = values.config.config, values.data_root
  is_begun = parallel.from_primary((workdir / model_file.CONFIG_FILE).exists())
  if "train" not in values.do or values.resume and is_begun:
    # Process 0 reads: other hosts may not see the folder.
    fields = parallel.on_primary(lambda: model_file.config_of(workdir))
    data_root = data_root or (not values.synthetic and fields.get("data_root"))
    if not values.config.is_given:
      config = _with_overrides(values, fields)
  return config.replace(data_root=data_root or _default_data_root(values, config))


def _run_ensemble(values: flags.FlagValues, workdir: Path) -> None:
  """Evaluates or ranks with an ensemble, on the data of its first model."""
  fields = parallel.on_primary(lambda: model_file.config_of(values.ensemble[0]))
  config = _with_overrides(values, fields)
  data_root = values.data_root or config.data_root or DEFAULT_DATA_ROOT
  config = config.replace(data_root=data_root)
  ensemble = Ensemble(values.ensemble, combine=values.combine)
  workdir.mkdir(parents=True, exist_ok=True)
  data = data_of(config)[0]
  for step, default in {"evaluate": "valid", "predict": "test"}.items():
    if step in values.do:
      results.check_folds(config, data, ensemble, split=values.split or default)
  if "evaluate" in values.do:
    results.evaluate_ensemble(config, data, ensemble, workdir, split=values.split or "")
  if "predict" in values.do:
    split = values.split or "test"
    results.predict(data, ensemble, workdir, split=split)


def _default_data_root(values: flags.FlagValues, config: Config) -> str:
  """The folder of the data without `--data_root`: synthetic data, or `DEFAULT_DATA_ROOT`.

  Raises:
    FileNotFoundError: no data at `DEFAULT_DATA_ROOT`.
  """
  if values.synthetic:
    return _synthetic(config, files.local_of(values.workdir) / "synthetic")
  if parallel.from_primary(files.expanded(DEFAULT_DATA_ROOT).is_dir()):
    return DEFAULT_DATA_ROOT
  if config.data.source == datasets.OWN:
    raise FileNotFoundError(
      f"there is no data at {DEFAULT_DATA_ROOT}: name the folder of the collection "
      f"{config.data.search} with --data_root (in a checkout --data_root=data/own/npz has the "
      "example programs; python -m tpugraphs_jax.collect makes one from your own)"
    )
  raise FileNotFoundError(
    f"there is no data at {DEFAULT_DATA_ROOT}: download it (python -m "
    f"tpugraphs_jax.data.download --data_root {DEFAULT_DATA_ROOT}), name another folder with "
    "--data_root, or try the command on tiny synthetic data with --synthetic"
  )


def _synthetic(config: Config, folder: Path) -> str:
  """Generates tiny synthetic data of the config's collections."""
  Ranker(config)  # refuses the config before anything is written
  names = [data.collection.name for data in data_of(config)]
  make = functools.partial(
    synthetic.generate, folder, scale="tiny", collections=names, progress=False
  )
  console.say(f"--synthetic: tiny synthetic data in {folder}, not measured on real programs")
  parallel.primary_only(make)()
  parallel.barrier("synthetic data")
  if not folder.exists():  # on a host that does not share the disk
    make()
  return str(folder / "npz")
