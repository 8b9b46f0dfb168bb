"""Runs the benchmarks of speed and memory and records their figures in `results.json`.

    python -m benchmarks.run_all
    python -m benchmarks.run_all layout_step gst

Each benchmark runs in a fresh process. Its figures are recorded with date, machine and
versions; the recorded ones were measured on two CPU cores that did nothing else. The second
command runs two benchmarks and leaves the figures of the others as they are. `tune.py` records
its figures in the same file. Scripts of version 0.1.0 made those of `tile_step`, `layout_data`,
`scaling` and `aggregation`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
import json
from pathlib import Path
from typing import Any

from benchmarks import pages, timing

# Cases of `comparison.py`, and the modules of the other benchmarks.
_COMPARISONS = {
  "layout_step": "`ResModel` training step, 8 programs of 6,000 nodes",
  "layout_rank": "ranking 1,000 configurations of 10,000 nodes",
  "sage_step": "`SAGE` 128 x 3 training step, 10,000 nodes, 64 configurations",
}
_OTHERS = {"gst": "gst", "tables": "score_tables"}
_RESULTS = Path(__file__).parent / "results.json"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
  """Seconds of both formulations, their ratio and peak memory, as a Markdown table."""
  return pages.table(
    ["benchmark", "plain", "ours", "ratio", "peak plain", "peak ours"],
    [
      [
        description,
        f"{row['plain_s']:.2f} s",
        f"{row['ours_s']:.2f} s",
        f"{row['ratio']:.1f} x",
        f"{row['plain_peak_mib']:,.0f} MiB",
        f"{row['ours_peak_mib']:,.0f} MiB",
      ]
      for name, description in _COMPARISONS.items()
      if (row := results.get(name))
    ],
  )


def record(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
  """Replaces the figures of one benchmark in `results.json`; returns those of all benchmarks."""
  results = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
  results[name] = {"machine": timing.machine(), **figures}
  timing.write(results, _RESULTS)
  return results


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("names", nargs="*", metavar="name", choices=[[], *_COMPARISONS, *_OTHERS])
  names = parser.parse_args().names or [*_COMPARISONS, *_OTHERS]
  for name in names:
    print(f"--- {name}", flush=True)
    module = ("comparison", name) if name in _COMPARISONS else (_OTHERS[name],)
    results = record(name, timing.in_subprocess(*module))
  print(table(results))


if __name__ == "__main__":
  main()
