"""The two commands: from flags to a job, every mistake in one line."""

from __future__ import annotations

import functools
from logging import getLogger
from pathlib import Path
import sys
from typing import NoReturn

from absl import app, flags, logging
import jax
from ml_collections import config_flags
import ml_collections

from tpugraphs_jax.data import synthetic
from tpugraphs_jax.graph import DEFAULT_DATA_ROOT
from tpugraphs_jax.predict import saved
from tpugraphs_jax.predict.ensemble import COMBINATIONS, Ensemble
from tpugraphs_jax.run import configs, jobs
from tpugraphs_jax.train import parallel


def define_flags(default_config: str) -> None:
  """The flags of both commands.

  Args:
    default_config: config file used when `--config` is not given.
  """
  config_flags.DEFINE_config_file(
      "config", default_config, "Config file, as FILE.py:VARIANT, or a variant alone.")
  flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results.")
  flags.DEFINE_string(
      "data_root", None, f"Folder with tile/ and layout/ (default {DEFAULT_DATA_ROOT}).")
  flags.DEFINE_enum("mode", "all", jobs.MODES,
                    "What to do; later modes use what is in --workdir.")
  flags.DEFINE_list("ensemble", [], "With --mode=predict: folders of trained models that rank "
                    "together; results go to --workdir.")
  flags.DEFINE_enum("combine", "mean", tuple(COMBINATIONS), "What an ensemble averages.")
  flags.DEFINE_boolean("resume", False, "Go on with the run in --workdir.")
  flags.DEFINE_string("coordinator_address", None, "host:port of process 0 of several.")
  flags.DEFINE_integer("num_processes", None, "Number of processes.")
  flags.DEFINE_integer("process_id", None, "Number of this process.")
  flags.mark_flag_as_required("workdir")


def main(argv: list[str]) -> None:
  """Runs the command; what a user can get wrong ends in one line and exit code 1 or 2."""
  if len(argv) > 1:
    sys.exit(f"error: unexpected argument {argv[1]!r}; options start with --")
  values, config = flags.FLAGS, None
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
      if values.ensemble:
        _predict_together(values, workdir)
        return
      config = _config(values, workdir)
      jobs.run(config, workdir, mode=values.mode, resume=values.resume)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).splitlines()[0].rstrip(".")
    _fail(f"{reason}; a step takes less with a smaller --config.batch.graphs, with "
          "--config.batch.config_chunk, or on segments (layouts: variant gst_ed)")
  except (ValueError, OSError, FloatingPointError) as error:
    _fail(configs.as_flags(str(error), config))


def _fail(message: str) -> NoReturn:
  logging.debug("details", exc_info=True)
  print(f"error: {' '.join(message.split())}", file=sys.stderr)
  sys.exit(2)


def _config(values: flags.FlagValues, workdir: Path) -> ml_collections.ConfigDict:
  """The config that the flags ask for, with the place of the data as `data_root`."""
  config, data_root = values.config, values.data_root
  if values.mode in ("evaluate", "predict"):
    # Process 0 decides: the others may have no such disk.
    found = parallel.from_primary(
        saved.config_of(workdir) if parallel.is_primary() else None)
    data_root = data_root or found.get("data_root")
    if not values["config"].present:
      config = ml_collections.ConfigDict(found)
      config.update_from_flattened_dict(config_flags.get_override_values(values["config"]))
  with config.unlocked():
    config.data_root = data_root or _default_data_root(workdir)
  return config


def _predict_together(values: flags.FlagValues, workdir: Path) -> None:
  """Ranks the test split with several trained models; the first one's config names the data."""
  if values.mode != "predict":
    raise ValueError(f"--ensemble goes with --mode=predict, and --mode is {values.mode}")
  config = ml_collections.ConfigDict(saved.config_of(values.ensemble[0]))
  with config.unlocked():
    config.data_root = values.data_root or config.get("data_root") or DEFAULT_DATA_ROOT
  ensemble = Ensemble(values.ensemble, combine=values.combine)
  workdir.mkdir(parents=True, exist_ok=True)
  jobs.predict(jobs.Job.of(config).data, config.data_root, ensemble, workdir)


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


def launch(default_config: str) -> None:
  """Runs the command whose default config is that file of the project's."""
  # Which platforms jax looked for and did not find is of no use to anyone here.
  getLogger("jax._src.xla_bridge").setLevel("WARNING")
  app.run(main, flags_parser=functools.partial(_parse_flags, default_config))


def _parse_flags(default_config: str, argv: list[str]) -> list[str]:
  """As absl's own parser, but every mistake takes one line."""
  try:
    define_flags(str(configs.folder() / default_config))
    argv = [_with_resolved_config(arg, default_config) for arg in argv]
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


def _with_resolved_config(arg: str, default_config: str) -> str:
  flag, equals, value = arg.partition("=")
  is_config = flag.lstrip("-") == "config" and flag.startswith("-") and equals
  return f"--config={configs.resolve(value, default_config)}" if is_config else arg
