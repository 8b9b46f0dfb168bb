"""No long command or function is silent for more than eleven seconds.

Each gets something slow in the place of a compiler, a disk or a network: it sleeps. All run at the
same time, each in a process of its own.
"""

import contextlib
import itertools
from multiprocessing import connection
import os
import runpy
import subprocess
import sys
import time
import urllib.request

import jax
import pytest

from tests.support import commands, xplanes
import tpugraphs_jax
from tpugraphs_jax import collect, hlo, report, submission, sweep, synthetic, view
from tpugraphs_jax.data import download, store
from tpugraphs_jax.hlo import profiles, tpu, tuning_data
from tpugraphs_jax.rankers import ranker
from tpugraphs_jax.report import runs
from tpugraphs_jax.run import official
from tpugraphs_jax.run import python as run
from tpugraphs_jax.train import training
from tpugraphs_jax.tuning import compiler, estimate_command, measure, tiles, workers

_LONG, _MOST = 21.0, 11.0  # seconds: of slow work, without output
_BEGIN = b"begin\n"
_ARRAY = jax.ShapeDtypeStruct((8, 8), "float32")
_PROGRAMS = """
import jax
array = jax.ShapeDtypeStruct((8, 8), "float32")
PROGRAMS = {"product": (lambda x: x @ x, (array,))}
TILES = {"product": (lambda tile: lambda x: x @ x, (array,), [{"block": 8}])}
"""


class Slow(Exception):
  """Ends what was slow, and is no error of the user."""


def slow(*args, **kwargs):
  time.sleep(_LONG)
  raise Slow


def compiles_slowly(*args, **kwargs):
  time.sleep(_LONG)
  raise compiler.Ended("that was slow")


LONG = {}


def long(work):
  LONG[work.__name__] = work
  return work


@long
def estimate_programs(folder):
  estimate_command.main([str(folder / "programs.py"), "--targets", "v6e"])


@long
def estimate_variants(folder):
  results = str(folder / "results.jsonl")
  source, processes = str(folder / "programs.py"), ["--processes", "1"]
  estimate_command.main([source, "--targets", "v6e", "--variants", results, *processes])


@long
def estimate_beside_a_profile(folder):
  profiles.read = slow
  estimate_command.main(["--profile", str(xplanes.RECORDED)])


@long
def order_tiles(folder):
  tiles.main([str(folder / "programs.py"), "--target", "v6e"])


@long
def tune(folder):
  tpu.compile_function = slow
  tpugraphs_jax.tune(lambda x: x @ x, _ARRAY, target="v6e")


@long
def tune_here(folder):
  measure.compile_function = slow
  tpugraphs_jax.tune(lambda x: x @ x, _ARRAY)


@long
def collect_programs(folder):
  workers.collect = slow
  out = ["--out", str(folder / "out"), "--collection", "layout:own:few"]
  label = ["--label", "bytes_estimate"]
  collect.main(["--programs", str(folder / "programs.py"), *label, *out])


@long
def train(folder):
  training.load_graphs = slow
  run.train_model(
    "tile.py:ci", data_root=folder / "data/npz", workdir=folder / "run", batch__graphs=4
  )


@long
def train_by_command(folder):
  training.load_graphs = slow
  flags = ["--config=configs/layout.py:ci", f"--data_root={folder}/data/npz"]
  sys.argv = ["run_layout.py", *flags, f"--workdir={folder / 'by_command'}"]
  runpy.run_path("run_layout.py", run_name="__main__")


@long
def score(folder):
  model = _loaded()
  ranker.Ranker.prepare = slow
  tpugraphs_jax.rank(model, _program(folder))


@long
def explain(folder):
  model = _loaded()
  ranker.Ranker.prepare = slow
  model.explain(_program(folder), 1)


@long
def show(folder):
  ranker.Ranker.load = slow
  view.show(_program(folder), 1, model="layout-v3-estimate", as_table=True)


@long
def featurize(folder):
  tpu.compile_function = slow
  hlo.featurize(lambda x: x @ x, _ARRAY, target="v6e")


@long
def convert(folder):
  tuning_data.read_tuning = slow
  tuning_data.convert([folder / "a.pb"], folder / "converted", processes=1)


@long
def build_store(folder):
  store._build_graph = slow
  store.main(["build", f"--data_root={folder}/data/npz", "--workers=1"])


@long
def generate(folder):
  synthetic.write_file = slow
  synthetic.generate(folder / "new", workers=1)


@long
def download_collection(folder):
  urllib.request.urlopen = slow
  download.download_collection(folder / "downloads", "tile:xla")


@long
def write_report(folder):
  runs.read_all = report.read_all = slow
  report.write([folder], folder / "page.html")


@long
def sweep_configs(folder):
  sweep.do = slow
  sweep.main(["--config=tile.py:ci", "--synthetic", f"--out={folder / 'sweep'}"])


@long
def race(folder):
  subprocess.run = slow
  runpy.run_module("tpugraphs_jax.leaderboard.__main__")["main"](
    ["--collection=tile:xla", f"--data_root={folder}/data/npz", f"--workdir={folder / 'race'}"]
  )


@long
def read_official_weights(folder):
  official.read_weights = slow
  place = [f"--data_root={folder}/data/npz", f"--out={folder / 'official'}", "--weights=a.npz"]
  official.main(["--config=tile.py", *place])


@long
def check_submission(folder):
  submission.check = slow
  submission.main(["check", f"{folder}/a.csv", f"--data_root={folder}/data/npz"])


def _loaded():
  model = tpugraphs_jax.load("layout-v3-estimate")
  os.write(1, _BEGIN)  # of another function
  return model


def _program(folder):
  path, *_ = (folder / "data/npz/layout/xla/random/train").glob("*.npz")
  return tpugraphs_jax.read_layout(path)


def _run(name, folder, writer):
  """Runs one of `LONG` in this process, whose output goes to a pipe."""
  for stream in (1, 2):
    os.dup2(writer.fileno(), stream)
  writer.close()
  # The TPU compiler is a process that takes long and then gives up.
  tpu.full_name = lambda target: f"tpu:{target.removeprefix('tpu:')}"
  tpu.devices = lambda target: jax.devices()
  tpu.libtpu_version = lambda: "0.0.42.1"
  tpu.lower = lambda call, target: call.lower(call.arrays)
  compiler.Compiler._start = lambda self: None
  compiler.Compiler._ask = compiles_slowly
  os.write(1, _BEGIN)
  start = time.monotonic()
  with contextlib.suppress(Slow):
    LONG[name](folder)
  if time.monotonic() - start < _LONG:
    print("it did not meet what is slow")
    sys.exit(3)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
  """What each of `LONG` wrote, and when: by name a list of (seconds, bytes), the end the last."""
  folder = tmp_path_factory.mktemp("silence")
  (folder / "programs.py").write_text(_PROGRAMS)
  kinds = ["tile:xla", "layout:xla:random"]
  synthetic.generate(folder / "data", collections=kinds, limit=2, progress=False)
  context, processes, names, written = commands.server(), [], {}, {}
  for name in LONG:
    reader, writer = context.Pipe(duplex=False)
    processes.append(context.Process(target=_run, args=(name, folder, writer)))
    processes[-1].start()
    writer.close()
    names[reader], written[name] = name, []
  while names:
    for reader in connection.wait(list(names)):
      text = os.read(reader.fileno(), 1 << 16)
      written[names[reader]].append((time.monotonic(), text))
      if not text:
        del names[reader]
  for process in processes:
    process.join()
  return written


@pytest.mark.parametrize("name", LONG)
def test_long_work_is_never_silent(name, outputs):
  text = b"".join(text for _, text in outputs[name]).decode()
  assert text.startswith(_BEGIN.decode()) and "did not meet" not in text, text
  silence = max(after - now for (now, _), (after, _) in itertools.pairwise(outputs[name]))
  assert silence < _MOST, f"{silence:.1f} s of silence:\n{text}"
  assert "so far" in text and "stop it with" in text, text
