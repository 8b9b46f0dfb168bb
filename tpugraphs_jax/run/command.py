"""The two commands and their flags. A mistake of the user ends in one line.

jax is imported after the flags are parsed, so that help and mistyped flags answer at once.
"""

from __future__ import annotations

import functools
from logging import getLogger

from absl import app, flags

from tpugraphs_jax.graph import DEFAULT_DATA_ROOT, SPLITS
from tpugraphs_jax.infra import console, machine
from tpugraphs_jax.run import configs

DO = ("train", "evaluate", "predict")


def tile() -> None:
  """The command `tpugraphs-tile`, and `run_tile.py`."""
  _check_machine()
  parse = functools.partial(_parse_flags, "tile.py")
  app.run(functools.partial(main, "tile"), flags_parser=parse)


def layout() -> None:
  """The command `tpugraphs-layout`, and `run_layout.py`."""
  machine.keep_freed()
  _check_machine()
  app.run(
    functools.partial(main, "layout"), flags_parser=functools.partial(_parse_flags, "layout.py")
  )


def _check_machine() -> None:
  try:
    machine.check_address_space()
  except ValueError as error:
    console.fail(error)
  # jax logs every platform that it does not find.
  getLogger("jax._src.xla_bridge").setLevel("WARNING")


def _parse_flags(default_config: str, argv: list[str]) -> list[str]:
  define_flags()
  for flag in flags.FLAGS.get_key_flags_for_module(__name__):
    flags.FLAGS.register_key_flag_for_module(argv[0], flag)  # for --help
  return configs.parse_flags(argv, default_config)


def define_flags() -> None:
  """Defines the flags of both commands, except `--config` (`configs.parse_flags`)."""
  flags.DEFINE_string("workdir", None, "Folder for checkpoints, metrics and results.")
  flags.DEFINE_string(
    "data_root", None, f"Folder with tile/ and layout/ (default {DEFAULT_DATA_ROOT})."
  )
  flags.DEFINE_boolean(
    "synthetic", False, "Use tiny synthetic data, made in --workdir, instead of --data_root."
  )
  flags.DEFINE_boolean("print_config", False, "Print all fields of the config and end.")
  flags.DEFINE_boolean(
    "dry_run", False, "Print disk, memory and hours of the run, measured on a few steps, and end."
  )
  flags.DEFINE_boolean("report", True, "Write report.html into --workdir at the end.")
  flags.DEFINE_list(
    "do",
    list(DO),
    "Steps to take, of train, evaluate and predict (ranks); without train they use the model in "
    "--workdir.",
  )
  flags.register_validator(
    "do", lambda do: do and set(do) <= set(DO), message=f"expected some of {','.join(DO)}"
  )
  when = "With --do=evaluate or predict:"
  flags.DEFINE_enum(
    "split", None, SPLITS, f"{when} split to evaluate (default valid) or to rank (default test)."
  )
  flags.DEFINE_list(
    "ensemble", [], f"{when} trained models that rank together; results go to --workdir."
  )
  flags.DEFINE_string(
    "combine", "mean", "Ensembles average scores (mean), scores in [0, 1] (min_max), ranks (rank)."
  )
  flags.DEFINE_boolean("resume", False, "Continue the run in --workdir.")
  flags.DEFINE_string(
    "compilation_cache",
    None,
    "Folder of compiled programs that runs share (default: the user's cache).",
  )
  flags.DEFINE_string("coordinator_address", None, "host:port of process 0 of several.")
  flags.DEFINE_integer("num_processes", None, "Number of processes.")
  flags.DEFINE_integer("process_id", None, "Number of this process.")


def main(kind: str, argv: list[str]) -> None:
  """Runs the command; a mistake of the user ends in one line and exit code 2."""
  if len(argv) > 1:
    console.fail(f"unexpected argument {argv[1]!r}; options start with --")
  from tpugraphs_jax.run import launch

  launch.launch(flags.FLAGS, kind)
