"""Pages to look at: what one run did, or how several compare.

    python -m tpugraphs_jax.report RUN... --out report.html

  runs      what a working folder holds of a run
  compare   groups of runs with one config, and tests between them
  figures   curves, graphs, ranks (matplotlib)
  page      one HTML file without anything from elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
import os

FILE = "report.html"  # the page of a run, in its working folder


def write(
    folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, graph: str = ""
) -> None:
  """Writes the page of one or several runs.

  Args:
    folders: working folders.
    out: the HTML file.
    graph: whose predicted ranks and ranks by label are shown; chosen if not given.

  Raises:
    FileNotFoundError: a folder holds no run.
    ImportError: matplotlib is not installed; says how to install it.
    ValueError: no run judged that graph.
  """
  from tpugraphs_jax import files
  from tpugraphs_jax.report import page, runs  # matplotlib is an extra

  text = page.render(runs.read_all(folders), graph=graph)
  with files.replacing(out, encoding="utf-8") as file:
    file.write(text)
