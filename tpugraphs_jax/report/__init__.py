"""Report pages: one run, or several compared.

  python -m tpugraphs_jax.report RUN...

runs      reads working folders: runs, and groups of runs with one config
errors    Kendall tau by size, configurations and opcodes of graphs
figures   curves, graphs, ranks (matplotlib)
page      the page of runs, from the template page.html
templates what all pages have in common (jinja2)
"""

from __future__ import annotations

from collections.abc import Sequence
import os

from absl import logging

from tpugraphs_jax.infra import console, files

FILE = "report.html"  # the page of a run, in its working folder


@console.working("drawing the report page")
def write(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
  """Writes the page of one or several runs.

  Args:
    folders: working folders of runs or of sweeps.
    out: the HTML file.

  Raises:
    FileNotFoundError: a folder holds no run.
    ValueError: a file of a run is damaged.
  """
  from tpugraphs_jax.report import page, runs  # matplotlib takes a second

  folder = os.path.dirname(os.fspath(out)) or "."
  text = page.render(runs.read_all(folders), folder)
  with files.replacing(out, encoding="utf-8") as file:
    file.write(text)


def try_write(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
  """As `write`, and says where the page is. A page that cannot be drawn fails no run."""
  try:
    write(folders, out)
    console.say(f"report: {out}")
  except OSError as error:
    console.say(f"no report page: {console.one_line(error)}")
  except Exception:  # pylint: disable=broad-exception-caught
    logging.warning("no report page could be drawn", exc_info=True)
