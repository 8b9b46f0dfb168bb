"""The program view: a graph, its layouts and their costs, in Model Explorer or as a table.

  view.show(graph)                                 # of a file, or of tpugraphs_jax.hlo
  view.show(graph, 3, against=0, model="layout-v3-estimate")
  view.show(tuned)                                 # of tpugraphs_jax.tune

Model Explorer comes with the extra `view`. Without it the same values are a table.
"""

from __future__ import annotations

import sys
from typing import Any

from tpugraphs_jax.graph import OpGraph
from tpugraphs_jax.infra import console
from tpugraphs_jax.tuning.layouts import TunedProgram
from tpugraphs_jax.tuning.tuned import Tuned
from tpugraphs_jax.view import panes

MISSING = f"the picture needs Model Explorer, and this is its table: {console.to_install('view')}"


def show(
  program: OpGraph | Tuned | TunedProgram,
  config: int | None = None,
  *,
  against: int | None = None,
  model: Any = None,
  **options: Any,
) -> None:
  """Shows a program: in a notebook below the cell, elsewhere in a browser until it is interrupted.

  Args:
    program: a graph from a file or from `tpugraphs_jax.hlo`; or the result of `tpugraphs_jax.tune`,
      of a function or of a file of `Tuned.save`, before and after its layouts were chosen.
    config: number of a configuration, whose layouts are shown.
    against: number of another one, which is shown beside it.
    model: as for `tpugraphs_jax.explain`: also the cost of each layout.
    **options: `port` of this machine, a free one by default; `browser=False` opens none;
      `as_table=True` prints the table instead.

  Raises:
    ValueError, FileNotFoundError: as `panes.graph_panes`; another program, or a number for layouts
      that were chosen.
  """
  if not isinstance(program, (OpGraph, Tuned, TunedProgram)):
    found = repr(program) if isinstance(program, str) else f"a {type(program).__name__}"
    raise ValueError(
      f"found {found}, expected a graph (as of read_layout or read_tile) or the result of tune"
    )
  if isinstance(program, OpGraph):
    views = panes.graph_panes(program, config, against=against, model=model)
    _show(program, views, panes.table(program, views), **options)
  elif (config, against, model) == (None, None, None):
    program = program.program if isinstance(program, Tuned) else program
    _show(program.graph, panes.program_panes(program), program.table(), **options)
  else:
    raise ValueError(
      "layouts that were chosen have no numbers: leave config, against and model out"
    )


def _show(
  graph: OpGraph,
  views: list[panes.Pane],
  table: console.Table,
  *,
  port: int = 0,
  browser: bool = True,
  as_table: bool = False,
) -> None:
  if not as_table:
    try:
      from tpugraphs_jax.view import explorer
    except ModuleNotFoundError as error:
      if error.name not in ("model_explorer", "portpicker"):
        raise
    else:
      explorer.serve(explorer.Page(graph, views), port=port, browser=browser)
      return
  if "ipykernel" in sys.modules:
    from IPython import display

    display.display(table)
  else:
    print(console.printable(str(table)))
  if not as_table:
    print(MISSING, file=sys.stderr)
