"""Models that come with the package, by name, each with a card."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "shipped_models"


def names() -> list[str]:
  """Names of the models, such as `layout-v3-estimate`."""
  return sorted(path.stem for path in FOLDER.glob("*.npz"))


def find(place: str | Path) -> Path:
  """The file of a model that ships, where `place` is its name and no path; else `place`.

  Raises:
    FileNotFoundError: a name without a path, of nothing that is here or ships.
  """
  path = Path(place)
  if path.exists() or path.name != str(place):
    return path
  if path.name not in names():
    raise FileNotFoundError(f"{place!s} is missing: name a folder that a model was trained in, a "
                            f"model file, or a model that ships ({', '.join(names())})")
  return FOLDER / f"{place}.npz"


def card(name: str) -> str:
  """What a model was trained on and what it is worth, in Markdown.

  Raises:
    ValueError: no model of that name ships.
  """
  if name not in names():
    raise ValueError(f"no model {name!r} ships, expected one of {', '.join(names())}")
  return (FOLDER / f"{name}.md").read_text()
