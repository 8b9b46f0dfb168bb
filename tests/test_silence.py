"""No long command or function is silent, by a clock on which .25 s stand for the ten of a user.

Each gets something slow in the place of a compiler, a disk or a network.
"""

import contextlib
import functools
import io
import itertools
import time
import urllib.error
import urllib.request

import jax
import pytest

import tpugraphs_jax
from tpugraphs_jax import collect, hlo, report, submission, sweep, synthetic
from tpugraphs_jax.data import download, store
from tpugraphs_jax.hlo import tpu, tuning_data
from tpugraphs_jax.infra import console
from tpugraphs_jax.rankers import ranker
from tpugraphs_jax.report import figures, runs  # noqa: F401 -- imports of drawing take seconds
from tpugraphs_jax.run import python as run
from tpugraphs_jax.train import training
from tpugraphs_jax.tuning import compiler, estimate, measure, tiles, workers

_TEN, _LONG = 0.25, 1.6
_MOST = 4 * _TEN  # of silence; machines on which tests run are busy
_ARRAY = jax.ShapeDtypeStruct((8, 8), "float32")
_PROGRAMS = """
import jax
array = jax.ShapeDtypeStruct((8, 8), "float32")
PROGRAMS = {"product": (lambda x: x @ x, (array,))}
TILES = {"product": (lambda tile: lambda x: x @ x, (array,), [{"block": 8}])}
"""


class Slow(Exception):
  """Ends what was slow, and is no error of the user."""


class Screen(io.StringIO):
  """Standard output and error of a command, with the time of each line."""

  def __init__(self):
    super().__init__()
    self.times = []

  def write(self, text):
    self.times.append(time.monotonic())
    return super().write(text)


def _slow(*args, error=Slow, **kwargs):
  time.sleep(_LONG)
  raise error("that was slow")


LONG = []


def _long(work):
  LONG.append(work)
  return work


@_long
def estimate_programs(patch, folder):
  estimate.main([str(folder / "programs.py"), "--targets", "v6e"])


@_long
def order_tiles(patch, folder):
  tiles.main([str(folder / "programs.py"), "--target", "v6e"])


@_long
def tune(patch, folder):
  patch(tpu, "compile_function", _slow)
  tpugraphs_jax.tune(lambda x: x @ x, _ARRAY, target="v6e")


@_long
def tune_here(patch, folder):
  patch(measure, "compile_function", _slow)
  tpugraphs_jax.tune(lambda x: x @ x, _ARRAY)


@_long
def collect_programs(patch, folder):
  patch(workers, "collect", _slow)
  out = ["--out", str(folder / "out"), "--collection", "layout:own:few"]
  label = ["--label", "bytes_estimate"]
  collect.main(["--programs", str(folder / "programs.py"), *label, *out])


@_long
def train(patch, folder):
  patch(training, "load_graphs", _slow)
  run.train_model(
    "tile.py:ci", data_root=folder / "data" / "npz", workdir=folder / "run", batch__graphs=4
  )


@_long
def score(patch, folder):
  patch(ranker.Ranker, "prepare", _slow)
  (graph, *_) = sorted(folder.glob("data/npz/layout/xla/random/train/*.npz"))
  tpugraphs_jax.rank("layout-v3-estimate", tpugraphs_jax.read_layout(graph))


@_long
def featurize(patch, folder):
  patch(tpu, "compile_function", _slow)
  hlo.featurize(lambda x: x @ x, _ARRAY, target="v6e")


@_long
def convert(patch, folder):
  patch(tuning_data, "read_tuning", _slow)
  tuning_data.convert([folder / "a.pb"], folder / "out", processes=1)


@_long
def build_store(patch, folder):
  patch(store, "_build_graph", _slow)
  store.main(["build", f"--data_root={folder}/data/npz", "--workers=1"])


@_long
def generate(patch, folder):
  patch(synthetic, "write_file", _slow)
  synthetic.generate(folder / "new", workers=1)


@_long
def download_collection(patch, folder):
  patch(urllib.request, "urlopen", functools.partial(_slow, error=urllib.error.URLError))
  patch(download, "_PAUSE_SECONDS", 0.01)
  download.download_collection(folder / "new", "tile:xla")


@_long
def write_report(patch, folder):
  patch(runs, "read_all", _slow)
  report.write([folder], folder / "page.html")


@_long
def sweep_configs(patch, folder):
  patch(sweep, "do", _slow)
  sweep.main(["--config=tile.py:ci", "--synthetic", f"--out={folder / 'sweep'}"])


@_long
def check_submission(patch, folder):
  patch(submission, "check", _slow)
  submission.main(["check", f"{folder}/a.csv", f"--data_root={folder}/data/npz"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("silence")
  (folder / "programs.py").write_text(_PROGRAMS)
  kinds = ["tile:xla", "layout:xla:random"]
  synthetic.generate(folder / "data", collections=kinds, limit=2, progress=False)
  return folder


@pytest.fixture(autouse=True)
def slow_compiler(monkeypatch):
  """The TPU compiler is a process that takes long and then gives up."""
  monkeypatch.setattr(tpu, "full_name", lambda target: f"tpu:{target.removeprefix('tpu:')}")
  monkeypatch.setattr(tpu, "devices", lambda target: jax.devices())
  monkeypatch.setattr(tpu, "libtpu_version", lambda: "0.0.42.1")
  monkeypatch.setattr(tpu, "lower", lambda call, target: call.lower(call.arrays))
  monkeypatch.setattr(compiler.Compiler, "_start", lambda self: None)
  slow = functools.partial(_slow, error=compiler.Ended)
  monkeypatch.setattr(compiler.Compiler, "_ask", slow)


@pytest.mark.parametrize("work", LONG, ids=lambda work: work.__name__)
def test_long_work_is_never_silent(work, folder, monkeypatch):
  screen = Screen()
  monkeypatch.setattr(console, "SECONDS", _TEN)
  monkeypatch.setattr("sys.stdout", screen)
  monkeypatch.setattr("sys.stderr", screen)
  start = time.monotonic()
  with contextlib.suppress(Slow, download.DownloadError):
    work(monkeypatch.setattr, folder)
  times = [start, *screen.times, time.monotonic()]
  assert times[-1] - start > _LONG, screen.getvalue()
  silence = max(after - before for before, after in itertools.pairwise(times))
  assert silence < _MOST, f"{silence:.2f} s of silence:\n{screen.getvalue()}"
  assert "so far" in screen.getvalue() and "stop it with" in screen.getvalue()
