"""Writes docs/program.png, the picture of a program with its changed layouts in README.md.

    pip install ".[tpu,view]" playwright
    python tools/program_picture.py

Tunes the README's network for TPU v3 and shows it before and after in Model Explorer. Needs
Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tempfile

from playwright import sync_api

ROOT = Path(__file__).parents[1]
_QUIET = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path, default=ROOT / "docs" / "program.png")
  args = parser.parse_args()
  browser = shutil.which("chromium") or shutil.which("chromium-browser")
  if browser is None:
    sys.exit("error: there is no Chromium: apt-get install chromium")
  with tempfile.TemporaryDirectory() as folder:
    layouts = Path(folder) / "layouts.json"
    names: dict = {}
    readme = (ROOT / "README.md").read_text()
    exec(
      next(
        code
        for code in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)  # pylint: disable=exec-used
        if "tune(" in code
      ),
      names,
    )
    names["tuned"].save(layouts)
    server = subprocess.Popen(
      [sys.executable, "-u", "-m", "tpugraphs_jax.view", layouts, "--no_browser"],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      text=True,
    )
    try:
      address = next(line.strip() for line in server.stdout if line.startswith("http://"))
      shoot(browser, address, args.out)
    finally:
      server.kill()
  print(f"wrote {args.out}")


def shoot(browser: str, address: str, out: Path) -> None:
  """Writes the picture of a page: all of the program before, a changed node after."""
  with sync_api.sync_playwright() as playwright:
    chromium = playwright.chromium.launch(executable_path=browser, args=list(_QUIET))
    page = chromium.new_page(viewport={"width": 1300, "height": 720})
    page.goto(address)
    page.get_by_text("Node info").nth(1).wait_for(timeout=60_000)  # of the changed node
    page.wait_for_timeout(5_000)
    for toggle in page.locator(".hide-toggle").all():
      toggle.click()
      page.wait_for_timeout(2_000)
    page.mouse.move(0, 0)
    page.wait_for_timeout(2_000)
    page.screenshot(path=out)
    chromium.close()


if __name__ == "__main__":
  main()
