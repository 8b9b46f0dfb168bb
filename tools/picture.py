"""Writes docs/report.png, the picture of a report page in docs/reports.md.

    make demo
    python -m tools.picture out/demo_tile/report.html

Needs Chromium (`apt-get install chromium`). The picture shows the upper part of the page in a
window 700 pixels wide, two pixels of the picture for each.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile

ROOT = Path(__file__).parents[1]
_QUIET = (
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-sync",
  "--disable-background-networking",
  "--disable-component-update",
  "--hide-scrollbars",
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("page", type=Path, help="HTML file of the report")
  parser.add_argument("--out", type=Path, default=ROOT / "docs" / "report.png")
  parser.add_argument("--width", type=int, default=700, help="pixels")
  parser.add_argument("--height", type=int, default=1000, help="pixels")
  args = parser.parse_args()
  browser = shutil.which("chromium") or shutil.which("chromium-browser")
  if browser is None:
    sys.exit("error: there is no Chromium: apt-get install chromium")
  with tempfile.TemporaryDirectory() as profile:
    subprocess.run(
      [
        browser,
        "--headless",
        *_QUIET,
        f"--user-data-dir={profile}",
        f"--window-size={args.width},{args.height}",
        "--force-device-scale-factor=2",
        f"--screenshot={args.out.resolve()}",
        args.page.resolve().as_uri(),
      ],
      check=True,
      capture_output=True,
      timeout=120,
    )
  print(f"wrote {args.out}")


if __name__ == "__main__":
  main()
