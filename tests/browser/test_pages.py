"""Pages in a real browser, Chromium: lane `browser`, which installs what these tests need."""

import contextlib
import shutil
import time

import pytest

from tests.support import steps
from tests.support.run_folders import several_runs, write_run
from tpugraphs_jax import report
from tpugraphs_jax.tuning import comparison, summary, tiles

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LONG = "a_name_" + 193 * "x"
_EVIL = '"><img src=x onerror="window.ran = 1"><script>window.ran = 1</script>'
_WIDTHS, _SCHEMES = (400, 1600), ("light", "dark")
_LARGE = 5000


@pytest.fixture(scope="module")
def chromium():
  path = next(filter(None, map(shutil.which, _BROWSERS)), None)
  assert path is not None, "there is no Chromium: apt-get install chromium"
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    yield browser
    browser.close()


@pytest.fixture
def opened(chromium):
  """Opens a page; the block ends with an error if it wrote to the console or asked for a file."""

  @contextlib.contextmanager
  def opened(path, *, width=1600, scheme="light"):
    context = chromium.new_context(
      viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    tab, said, asked = context.new_page(), [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(path.as_uri())
    yield tab
    assert not said
    assert asked == [path.as_uri()]
    assert tab.evaluate("window.ran") is None
    context.close()

  return opened


def _estimate(*rows, name="step"):
  return summary.Estimate(name, rows, {"jax": "1", "libtpu": "2"})


def _evil_step():
  names = (_LONG, _EVIL, "fusion.3")
  kernels = [
    steps.kernel(
      name,
      1.0 + number,
      scope=f"{name.replace('/', '')}/Dense",
      operation=name,
      where=f"{name}.py:12",
      bound=steps.BOUNDS[number],
    )
    for number, name in enumerate(names)
  ]
  return steps.row(kernels, between=0.5, live=steps.live())


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  """Every kind of page, with long names and names that are HTML."""
  folder = tmp_path_factory.mktemp("pages")
  run = write_run(folder / f"run {_LONG[:100]}", collection="tile:xla")
  report.write([run], folder / "run.html")
  report.write(several_runs(folder / "several"), folder / "runs.html")  # a leaderboard, a sweep
  before = _estimate(_evil_step(), steps.row([steps.kernel("a", 2.0)], target="tpu:7x"), name=_EVIL)
  after = _estimate(steps.row([*_evil_step().kernels, steps.kernel(_LONG + "y", 4.0)]), name=_EVIL)
  before.save_html(folder / "estimate.html")
  comparison.compare([before], [after]).save_html(folder / "comparison.html")
  times = (tiles.TileTime({_LONG: 8}, 1.0), tiles.TileTime({_EVIL: 16}, 2.0))
  tiles.Tiles(_EVIL, "tpu:v6e", times).save_html(folder / "tiles.html")
  part = f"<!doctype html><meta charset=utf-8><body>{before._repr_html_()}</body>"
  (folder / "notebook.html").write_text(part)
  return folder


_KINDS = ("run", "runs", "estimate", "comparison", "tiles", "notebook")


@pytest.mark.parametrize("kind", _KINDS)
def test_a_page_is_silent_and_as_wide_as_its_window(kind, pages, opened):
  for width in _WIDTHS:
    for scheme in _SCHEMES:
      with opened(pages / f"{kind}.html", width=width, scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("table").count()


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind != "notebook"])
def test_a_page_has_light_text_on_dark_where_the_reader_wants_it(kind, pages, opened):
  lightness = (
    "getComputedStyle(document.body).{}.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
  )
  for scheme, sign in zip(_SCHEMES, (1, -1)):
    with opened(pages / f"{kind}.html", scheme=scheme) as tab:
      paper, ink = (tab.evaluate(lightness.format(name)) for name in ("backgroundColor", "color"))
      assert sign * (paper - ink) > 300


@pytest.mark.parametrize("kind", ["run", "runs", "estimate", "comparison"])
def test_a_table_is_sorted_by_the_keyboard(kind, pages, opened):
  with opened(pages / f"{kind}.html") as tab:
    table = tab.locator("table").filter(has=tab.locator("tbody tr:nth-child(3)")).first
    table.evaluate("table => { for (let at = table; at; at = at.parentElement) at.open = true; }")
    place = table.locator("th.number").first.evaluate("head => head.cellIndex")
    head = table.locator("th").nth(place)
    numbers = []
    for _ in range(2):
      head.focus()
      assert head.evaluate("head => document.activeElement === head")
      tab.keyboard.press("Enter")
      cells = table.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()
      found = [cell.split("±")[0].replace(",", "").strip(" %x\n") for cell in cells]
      numbers.append([float(cell) for cell in found if cell.replace(".", "").isdigit()])
    assert numbers[0] == sorted(numbers[0]) and numbers[1] == numbers[0][::-1]


def test_the_flame_is_read_and_zoomed_by_the_keyboard(pages, opened):
  with opened(pages / "estimate.html") as tab:
    frame = tab.locator(".frame", has_text="Dense").first
    before = frame.bounding_box()["width"]
    frame.focus()
    assert frame.get_attribute("title") in tab.locator(".about").first.inner_text()
    tab.keyboard.press("Enter")
    flame = tab.locator(".flame").first.bounding_box()["width"]
    assert frame.bounding_box()["width"] == pytest.approx(flame, rel=0.02) and before < flame
    tab.keyboard.press("Escape")
    assert frame.bounding_box()["width"] == pytest.approx(before, rel=0.02)


def test_the_timeline_is_zoomed_and_moved_by_the_keyboard(pages, opened):
  with opened(pages / "estimate.html") as tab:
    canvas = tab.locator("canvas").first
    picture = lambda: canvas.evaluate("canvas => canvas.toDataURL()")
    canvas.focus()
    seen = [picture()]
    for key in ("+", "ArrowRight", "+"):
      tab.keyboard.press(key)
      seen.append(picture())
    assert len(set(seen)) == len(seen)
    tab.keyboard.press("0")
    assert picture() == seen[0]


def test_everything_of_use_is_reached_by_tab(pages, opened):
  with opened(pages / "estimate.html") as tab:
    reached = set()
    for _ in range(60):
      tab.keyboard.press("Tab")
      reached.add(tab.evaluate("document.activeElement.tagName"))
    assert {"A", "TH", "BUTTON", "CANVAS", "SUMMARY"} <= reached


def test_a_page_of_many_kernels_is_ready_in_two_seconds(tmp_path, opened):
  _estimate(steps.large(_LARGE)).save_html(tmp_path / "large.html")
  start = time.monotonic()
  with opened(tmp_path / "large.html") as tab:
    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert time.monotonic() - start < 2
    tab.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert tab.locator("tbody tr").count() >= _LARGE
    head = tab.locator("th", has_text="share").last
    took = head.evaluate(
      "head => { const start = performance.now(); head.click(); return performance.now() - start; }"
    )
    assert took < 2000
    shares = tab.locator("tbody").last.locator("td:first-child").all_inner_texts()
    assert [float(share.rstrip("%")) for share in shares] == sorted(
      float(share.rstrip("%")) for share in shares
    )
