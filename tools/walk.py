"""Lists the files that a run reads through, in the order of the first call.

    python -m tools.walk                        prints the list of `xla-random,full,ci`
    python -m tools.walk --write                writes it into docs/architecture.md

The run trains, evaluates and ranks on tiny synthetic data. The list has the files whose functions
the pages of a run (`run`, `train`, `rankers`) call. It leaves out the layers of `nn`, the tools of
`infra`, and the files that generate the synthetic data.
"""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import textwrap
import threading

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
_PAGES, _TOOLS = ("run", "train", "rankers"), ("infra", "nn", "synthetic")
_WIDTH = 120
_BLOCK = re.compile(r"(<!-- walk -->\n```\n).*?(```\n)", re.S)


def files_of(config: str) -> list[str]:
  """Runs a config and returns the files whose functions it calls, relative to the package."""
  from tpugraphs_jax import run

  package, seen = str(ROOT / "tpugraphs_jax") + os.sep, {}

  def profile(frame, event, argument):
    del argument
    code = frame.f_code
    if (
      event == "call"
      and code.co_filename.startswith(package)
      and code.co_flags & inspect.CO_OPTIMIZED  # no body of a class
      and not code.co_name.startswith("<")  # nor a generator of a module that is imported
    ):
      name, caller = code.co_filename.removeprefix(package), frame.f_back.f_code.co_filename
      is_page = name.startswith(_PAGES) or caller.removeprefix(package).startswith(_PAGES)
      if is_page and not name.startswith(_TOOLS):
        seen.setdefault(name)

  with tempfile.TemporaryDirectory() as workdir:
    sys.argv = ["run", f"--config={config}", "--synthetic", f"--workdir={workdir}/run"]
    sys.argv += ["--noreport"]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
      (run.tile if "tile.py" in config else run.layout)()
    except SystemExit as end:
      if end.code:
        raise
    finally:
      sys.setprofile(None)
      threading.setprofile(None)
  return list(seen)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", default="configs/layout.py:xla-random,full,ci")
  parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
  parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.out:
    args.out.write_text("\n".join(files_of(args.config)))
    return
  with tempfile.NamedTemporaryFile() as calls:  # apart from the output of the run
    subprocess.run(
      [sys.executable, "-m", "tools.walk", "--config", args.config, "--out", calls.name],
      check=True,
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    files = Path(calls.name).read_text().splitlines()
  text = textwrap.fill(", ".join(files), _WIDTH) + "\n"
  if args.write:
    PAGE.write_text(_BLOCK.sub(lambda block: block[1] + text + block[2], PAGE.read_text()))
  else:
    print(f"{text}{len(files)} files")


if __name__ == "__main__":
  main()
