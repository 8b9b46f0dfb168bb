"""Which graphs of a split a run takes; graphs and files left out are named and counted."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
from pathlib import Path
from typing import Any

from absl import logging

from tpugraphs_jax.data import npz
from tpugraphs_jax.graph import LayoutConfigs, OpGraph, TileConfigs


def keep(
    graphs: Sequence[OpGraph], purpose: str, why_not: Callable[[Any], str]
) -> list[OpGraph]:
  """Graphs that nothing speaks against; the others are counted and named by reason."""
  kept, skipped = [], collections.defaultdict(list)
  for graph in graphs:
    reason = why_not(graph.configs)
    (skipped[reason] if reason else kept).append(graph)
  for reason, group in skipped.items():
    logging.warning("skipped %d of %d graphs for %s: %s: %s", len(group), len(graphs), purpose,
                    reason, ", ".join(graph.name for graph in group))
  return kept


def why_not_trained(configs: TileConfigs | LayoutConfigs, *, min_configs: int) -> str:
  """The reason to leave a graph of any kind out of training; empty if there is none."""
  if len(configs) < min_configs:
    return f"fewer than {min_configs} configurations"
  return "" if configs.is_labelled else "no runtimes"


def why_not_judged(configs: TileConfigs | LayoutConfigs) -> str:
  """The reason to leave a graph out of evaluation; empty if there is none."""
  if len(configs) < 2:
    return "fewer than 2 configurations"
  return "" if configs.is_labelled else "no runtimes (ranked, not scored)"


def read_files(paths: Sequence[Path], read: Callable[[Path], OpGraph], *, skip_bad: bool):
  """Reads files in order; a malformed one raises, or is named and left out."""
  graphs = []
  for path in paths:
    try:
      graphs.append(read(path))
    except npz.NpzError as error:
      if not skip_bad:
        raise
      logging.warning("skipped %s", error)
  report_skipped(paths, len(paths) - len(graphs))
  return graphs


@contextlib.contextmanager
def explain_bad_files() -> Iterator[None]:
  """Inside, the error of a malformed file also says how to go on without it."""
  try:
    yield
  except npz.NpzError as error:
    raise ValueError(
        f"{error}; data.skip_bad_files=True leaves such files out") from None


def report_skipped(paths: Sequence[Path], bad: int) -> None:
  """Counts the malformed files of a split; ValueError if it has no others."""
  if bad == len(paths):
    raise ValueError(f"all {len(paths)} files in {paths[0].parent} are malformed")
  if bad:
    logging.warning("skipped %d of %d files in %s", bad, len(paths), paths[0].parent)


def check_kind(graph: OpGraph, kind: type) -> None:
  """Refuses (ValueError) a graph whose configurations are not of the class `kind`."""
  if not isinstance(graph.configs, kind):
    raise ValueError(f"{graph.name} has configs of type {type(graph.configs).__name__}; the model "
                     f"ranks {kind.__name__}")
