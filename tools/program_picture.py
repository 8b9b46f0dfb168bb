"""Writes docs/program.png, the picture of a tuned program in docs/view.md.

    pip install ".[tpu,view]" playwright
    python -m tools.program_picture

Tunes the README's network and shows it after that in Model Explorer, at the first changed
operation. Needs Chromium (`apt-get install chromium`). `--layouts FILE` shows layouts that
`Tuned.save` wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import re
import shutil
import sys
import threading

from playwright import sync_api
import portpicker

from tpugraphs_jax.tuning import layouts
from tpugraphs_jax.view import explorer, panes

ROOT = Path(__file__).parents[1]
_QUIET = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")


def tuned() -> layouts.TunedProgram:
  """The program that README.md tunes."""
  blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
  names: dict = {}
  exec(next(code for code in blocks if "tune(" in code), names)  # pylint: disable=exec-used
  return names["tuned"].program


def shoot(browser: str, address: str, out: Path) -> None:
  """Writes the picture of a page when it shows the facts of its node."""
  with sync_api.sync_playwright() as playwright:
    chromium = playwright.chromium.launch(executable_path=browser, args=list(_QUIET))
    page = chromium.new_page(viewport={"width": 1300, "height": 680})
    page.goto(address)
    page.get_by_text("Node info").wait_for(timeout=120_000)
    page.wait_for_timeout(5_000)
    page.mouse.move(0, 0)
    page.screenshot(path=out, timeout=120_000)
    chromium.close()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--layouts", type=Path, help="layouts to show, instead of tuning")
  parser.add_argument("--out", type=Path, default=ROOT / "docs" / "program.png")
  args = parser.parse_args()
  browser = shutil.which("chromium") or shutil.which("chromium-browser")
  if browser is None:
    sys.exit("error: there is no Chromium: apt-get install chromium")
  program = layouts.read(args.layouts) if args.layouts else tuned()
  page = explorer.Page(program.graph, panes.program_panes(program)[-1:])
  port = portpicker.pick_unused_port()
  threading.Thread(
    target=explorer.serve, args=(page,), kwargs={"port": port, "browser": False}, daemon=True
  ).start()
  shoot(browser, f"http://localhost:{port}/?data={page.to_url_param_value()}", args.out)
  print(f"wrote {args.out}")


if __name__ == "__main__":
  main()
