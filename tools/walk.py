"""Lists the files of the package whose functions a run calls, in the order of the first call.

    python tools/walk.py                        prints the list of `xla-random,gst_ed,ci`
    python tools/walk.py --write                writes it into docs/architecture.md

The run trains, evaluates and ranks on tiny synthetic data. The list leaves out files that
are only imported, and files that generate the synthetic data.
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
import threading

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
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
      and "synthetic" not in code.co_filename
    ):
      seen.setdefault(code.co_filename.removeprefix(package))

  with tempfile.TemporaryDirectory() as workdir:
    sys.argv = ["run", f"--config={config}", "--synthetic", f"--workdir={workdir}/run"]
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
  parser.add_argument("--config", default="configs/layout.py:xla-random,gst_ed,ci")
  parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
  parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.out:
    args.out.write_text("\n".join(files_of(args.config)))
    return
  with tempfile.NamedTemporaryFile() as found:  # apart from the output of the run
    subprocess.run(
      [sys.executable, __file__, "--config", args.config, "--out", found.name],
      check=True,
      cwd=ROOT,
      stdout=subprocess.DEVNULL,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    files = Path(found.name).read_text().splitlines()
  text = "".join(f"{number:3d} {name}\n" for number, name in enumerate(files, 1))
  if args.write:
    PAGE.write_text(_BLOCK.sub(lambda block: block[1] + text + block[2], PAGE.read_text()))
  else:
    print(f"{text}{len(files)} files")


if __name__ == "__main__":
  main()
