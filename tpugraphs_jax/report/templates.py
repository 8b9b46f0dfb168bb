"""The templates of pages: each page is one HTML file without anything from elsewhere.

`style.css`, `sort.js` and the macros of `parts.html` are common to all pages. A page runs the
scripts of its template and no other, and asks no server for anything.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
import math
import re
from typing import Any

import jinja2
import markupsafe

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SHORT = 24  # characters of a cell that is not broken into lines
_SCRIPTS = ("sort.js", "estimate.js")


class Number(str):
  """The text of a number, with or without its unit."""


def render(name: str, **values: Any) -> str:
  """The page of a template, without characters that XML does not allow."""
  environment = jinja2.Environment(
    loader=jinja2.FunctionLoader(_source),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters["shown"] = shown
  environment.filters["kind"] = short_kind
  is_number = lambda cell: isinstance(cell, (int, float, tuple, Number)) or cell == ""
  environment.tests["numeric"] = lambda column: all(map(is_number, column))
  environment.tests["short"] = lambda column: all(len(shown(cell)) <= _SHORT for cell in column)
  environment.globals |= {"script": _script, "policy": _policy, "nested": _nested}
  return without_controls(environment.get_template(name).render(**values))


def _source(name: str) -> str:
  return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _nested(name: str) -> markupsafe.Markup:
  """A style sheet whose rules for a page are for the element around them."""
  return markupsafe.Markup(re.sub(r"(:root|\bbody) {", "& {", _source(name)))


def _script(name: str) -> markupsafe.Markup:
  return markupsafe.Markup(f"<script>{_source(name)}</script>")


def _policy() -> markupsafe.Markup:
  """An element that lets a browser run the scripts of this package alone, and ask for nothing."""
  hashes = (hashlib.sha256(_source(name).encode()).digest() for name in _SCRIPTS)
  allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
  rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
  return markupsafe.Markup(f'<meta http-equiv="Content-Security-Policy" content="{rules}">')


def without_controls(text: str) -> str:
  """A text of a page or figure, with a sign in the place of characters that XML does not allow.

  Names of folders and values of a config may have them.
  """
  return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def short_kind(kind: str) -> str:
  """The kind of labels in a word or two for a title: SYNTHETIC, ESTIMATE, measured."""
  return "unknown kind" if kind.startswith("of ") else kind.split()[0].rstrip(":,")


def shown(value: Any) -> str:
  """A cell: an integer, a number to four places, a mean with its deviation, or words."""
  if isinstance(value, tuple):
    mean, deviation = value
    return shown(mean) + ("" if math.isnan(deviation) else f" ± {deviation:.4f}")
  if isinstance(value, float):
    small = "< 0.0001" if 0 < value < 5e-5 else f"{value:.4f}"
    return "–" if math.isnan(value) else small
  return f"{value:,}" if isinstance(value, int) else str(value)
