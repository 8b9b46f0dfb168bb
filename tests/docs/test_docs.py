"""The documentation hangs together: short front page, no dead link, no page left out."""

import re

import commands
import pytest
import readme_commands

PAGES = [commands.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((commands.ROOT / "docs").glob("*.md"))


def anchors(page):
  """The anchors of a page's headings, as Markdown renderers make them."""
  titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_front_page_takes_two_screens():
  assert len((commands.ROOT / "README.md").read_text().splitlines()) <= 90


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
  text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    if target.startswith("http"):
      continue
    name, _, anchor = target.partition("#")
    found = page.parent / name if name else page
    assert found.exists(), target
    assert not anchor or anchor in anchors(found), target


def test_every_page_is_in_the_site_and_has_its_commands_run():
  site = (commands.ROOT / "mkdocs.yml").read_text()
  for page in sorted((commands.ROOT / "docs").glob("*.md")):
    assert f": {page.name}\n" in site
    has_commands = bool(readme_commands.commands(page.read_text()))
    assert not has_commands or f"docs/{page.name}" in readme_commands.PAGES


@pytest.mark.parametrize("line, expected", [
    ("python run_tile.py --config=configs/tile.py:recommended --workdir=out/a",
     "python run_tile.py --config=configs/tile.py:recommended,ci --workdir=/o/a "
     "--data_root=/o/synthetic/npz"),
    ("python run_tile.py --config=configs/tile.py --workdir=out/a --synthetic",
     "python run_tile.py --config=configs/tile.py:ci --workdir=/o/a --synthetic"),
    ("python run_tile.py --print_config", "python run_tile.py --print_config"),
    ("python benchmarks/gst.py --x", "python benchmarks/gst.py --help"),
    ("python -m tpugraphs_jax.report out/a --out out/r.html",
     "python -m tpugraphs_jax.report /o/a --out /o/r.html")])
def test_commands_of_pages_are_run_small(tmp_path, line, expected):
  assert readme_commands.small(line, commands.Path("/o")) == expected
