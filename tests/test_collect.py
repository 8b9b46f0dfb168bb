"""The collect command, with a label that needs neither libtpu nor a quiet machine."""

import os
from pathlib import Path
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tpugraphs_jax import collect
from tpugraphs_jax.data import npz
from tpugraphs_jax.infra import tasks
from tpugraphs_jax.tuning import label_file

_ROOT = Path(__file__).parents[1]
# The long form: TPUGRAPHS_KILLS=10 python -m pytest tests/test_collect.py
_KILLS = int(os.environ.get("TPUGRAPHS_KILLS", "2"))
_PROGRAMS = """
import jax
import jax.numpy as jnp


def net(params, x):
  for kernel in params["kernels"]:
    x = jax.nn.relu(jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
  return x.reshape(x.shape[0], -1) @ params["out"]


def array(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = {"kernels": [array(3, 3, 5, 8), array(3, 3, 8, 8)], "out": array(8 * 42, 9)}, array(
    3, 7, 6, 5)
PROGRAMS = {
    "net": (net, ARGS),
    "gradient": (jax.grad(lambda *args: jnp.sum(net(*args) ** 2)), ARGS),
    "nothing": (jnp.sin, (array(4),)),
}
"""


def _arguments(root, out, *more):
  options = "--label bytes_estimate --configs 12 --jobs 2 --quiet --collection layout:own:tried"
  programs = f"{root}/tried.py:net", f"{root}/tried.py:gradient"
  return ["--programs", *programs, *options.split(), "--out", str(out), *more]


def _start(arguments):
  return subprocess.Popen(
    [sys.executable, "-m", "tpugraphs_jax.collect", *arguments],
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    start_new_session=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _printed(process):
  """What a command has said that ends without an error."""
  printed, _ = process.communicate(timeout=240)
  assert process.returncode == 0, printed
  return printed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  folder = tmp_path_factory.mktemp("programs")
  (folder / "tried.py").write_text(_PROGRAMS)
  return folder


@pytest.fixture(scope="module")
def collected(root):
  printed = _printed(_start(_arguments(root, root / "whole")))
  assert "2 of 2 programs collected" in printed
  assert int(re.search(r"; 24 labels, ([\d,]+) an hour and core", printed)[1].replace(",", "")) > 0
  return root / "whole"


def _files(out):
  """By path relative to the output folder the bytes of all data, and what stands beside them."""
  return {
    path.relative_to(out): (path.read_bytes(), label_file.collected(path))
    for path in sorted((out / "npz").rglob("*.npz"))
  }


def test_the_reader_of_the_released_files_reads_what_was_collected(collected):
  folder = collected / "npz/layout/own/tried/train"
  for name in ("tried_net", "tried_gradient"):
    graph = npz.read_layout(folder / f"{name}.npz")
    record = label_file.collected(folder / f"{name}.npz")
    assert record["source"] == f"tried.py:{name.removeprefix('tried_')}"
    assert len(graph.configs) == len(record["configs"]) == 12
    assert graph.configs.labels.tolist() == [
      config["bytes_accessed"] for config in record["configs"]
    ]
    assert len(np.unique(graph.configs.labels)) > 2
    # The first configuration is the compiler's own and decides nothing.
    rows = graph.configs.decode(np.arange(12))
    assert (rows[0] == -1).all()
    assert all((row != -1).any() for row in rows[1:])
    assert len({row.tobytes() for row in rows}) == 12
    for group, numbers in zip(
      record["groups"], np.transpose([config["numbers"] for config in record["configs"]])
    ):
      assert "<-" in group and numbers[0] == 0


def _labelled(out):
  """Number of configurations with a label or an error."""
  return sum(label_file.count(path) for path in out.rglob("*.jsonl"))


def test_killed_at_random_moments_it_goes_on_and_gives_the_same_files(root, collected):
  out = root / "killed"
  rng = random.Random(0)
  # Moments in the work, whatever the machine's speed: 24 configurations are labelled.
  for number, moment in enumerate(sorted(rng.sample(range(1, 21), _KILLS))):
    process = _start(_arguments(root, out))
    while _labelled(out) < moment:
      assert process.poll() is None, process.communicate()[0]
      time.sleep(0.005)
    # First the command alone: its workers must notice, and the next command waits for them.
    (os.killpg if number else os.kill)(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  _printed(_start(_arguments(root, out)))
  assert _files(out) == _files(collected)
  for path in out.rglob("*.jsonl"):
    results = [str(line["numbers"]) for line in label_file.records(path) if "raw" in line]
    assert len(results) == len(set(results)), "a configuration was compiled twice"


def test_collected_files_are_left_alone(root, collected, tmp_path):
  out = tmp_path / "moved"
  shutil.copytree(collected / "npz", out / "npz")
  assert "2 of 2 programs collected" in _printed(_start(_arguments(root, out)))
  assert _files(out) == _files(collected)
  assert _labelled(out) == _labelled(collected), "a configuration was labelled again"


def run_here(work, requests, *, processes, options):
  """Stands for a cluster: runs every request as its machine gets it, by pickle."""
  assert processes == 2 and options == ["--runner=X"]
  for request in pickle.loads(pickle.dumps(list(requests))):
    work(request)


def test_on_a_cluster_the_same_files_are_made(root, collected, monkeypatch, capsys):
  monkeypatch.setattr(tasks, "run_on_beam", run_here)
  out = root / "cluster"
  assert collect.main([*_arguments(root, out), "--", "--runner=X"]) == 0
  assert _files(out) == _files(collected)
  assert "2 of 2 programs collected" in capsys.readouterr().out


def test_a_machine_that_fails_or_is_lost_is_reported(root, monkeypatch, capsys):
  lost = _arguments(root, root / "partly")
  lost[1] = f"{root}/tried.py:nothing"
  monkeypatch.setattr(tasks, "run_on_beam", lambda work, requests, **options: work(requests[0]))
  assert collect.main([*lost, "--"]) == 1
  printed = capsys.readouterr()
  assert "0 of 2 programs collected" in printed.out
  assert "tried_nothing: " in printed.err and "no layout of its 0 groups" in printed.err
  assert "tried_gradient: its machine left no " in printed.err


def test_a_candidate_that_crashes_the_compiler_is_a_failure_and_the_others_go_on(root):
  # Stands for a compiler that aborts on some candidates.
  (root / "crashing.py").write_text(
    _PROGRAMS
    + """
import os
from tpugraphs_jax.tuning import choosing
from tpugraphs_jax.tuning.choosing import evaluate

def crashing(program, arrays, choice):
  if sum(place for place, orders in enumerate(choice.values()) if any(orders)) == 3:
    os.abort()
  return evaluate(program, arrays, choice)

choosing.evaluate = crashing
"""
  )
  arguments = _arguments(root, root / "crashed")
  arguments[1:3] = [f"{root}/crashing.py:net"]
  _printed(_start(arguments))
  (path,) = (root / "crashed").rglob("*.npz")
  record, lines = label_file.collected(path), label_file.records(path.with_suffix(".jsonl"))
  errors = {line["error"] for line in lines if "error" in line}
  assert errors == {"the compiler ended its process with status -6"}
  places = [sum(np.flatnonzero(config["numbers"])) for config in record["configs"]]
  assert len(places) == 12 and 3 not in places


def _ending(folder, name, act):
  """A file with a program that acts while jax traces it in a worker."""
  (folder / f"{name}.py").write_text(
    _PROGRAMS
    + f"""
import sys, time

def ending(x):
  if "tpugraphs_jax.tuning.workers" in " ".join(sys.orig_argv):
    {act}
  return x

PROGRAMS = {{"ending": (ending, (array(4, 4),))}}
"""
  )
  return str(folder / f"{name}.py")


def test_a_program_that_ends_its_process_is_a_failure_and_the_others_go_on(root, tmp_path, capsys):
  arguments = _arguments(root, tmp_path / "out")
  arguments[1:3] = [_ending(tmp_path, "gone", "sys.exit(0)"), f"{root}/tried.py:net"]
  assert collect.main(arguments) == 1
  printed = capsys.readouterr()
  assert "1 of 2 programs collected" in printed.out
  *_, failure = printed.err.splitlines()  # after lines about long work, on a busy machine
  assert failure.startswith("failed: gone_ending: ") and "ended with status 0" in failure
  assert not list((tmp_path / "out/npz").rglob("gone_ending*"))


def test_a_program_that_never_ends_is_a_failure(root, tmp_path, capsys):
  """Alone: on a busy machine another program may not begin within the seconds of `--timeout`."""
  arguments = _arguments(root, tmp_path / "out", "--timeout", "15")
  arguments[1:3] = [_ending(tmp_path, "hung", "time.sleep(10**6)")]
  assert collect.main(arguments) == 1
  printed = capsys.readouterr()
  assert "0 of 1 programs collected" in printed.out
  *_, failure = printed.err.splitlines()  # after lines about long work, on a busy machine
  assert failure.startswith("failed: hung_ending: ") and "labelled nothing for 15 s" in failure
  assert not (tmp_path / "out/npz").exists()


def test_a_program_that_leaves_a_thread_behind_is_collected(root, tmp_path, capsys):
  act = "__import__('threading').Thread(target=time.sleep, args=(10**6,)).start()"
  text = (tmp_path / _ending(tmp_path, "left", act)).read_text()
  (tmp_path / "left.py").write_text(
    text.replace("  return x\n\nPROGRAMS", "  return x @ x\n\nPROGRAMS")
  )
  arguments = _arguments(root, tmp_path / "out")
  arguments[1:3] = [str(tmp_path / "left.py")]
  assert collect.main(arguments) == 0, capsys.readouterr().err
  assert list((tmp_path / "out/npz").rglob("left_ending.npz"))


@pytest.mark.parametrize(
  "changes, message",
  [
    (("--timeout", "0"), "--timeout=0.0, expected seconds above 0"),
    (("--collection", "layout:xla:random"), "expected layout:own:NAME"),
    (("--configs", "1"), "--configs=1, expected at least 2"),
    (("--label", "seconds"), "unknown label 'seconds', expected one of tpu_estimate"),
    (("--label", "tpu_estimate"), "needs a target, such as --target=v3"),
    (("--label", "measured", "--"), "--label=measured measures one program after the other"),
    (("--target", "v3"), "label bytes_estimate is for the device at hand"),
  ],
)
def test_mistakes_end_in_one_line(root, capsys, changes, message):
  assert collect.main([*_arguments(root, root / "none"), *changes]) == 2
  (error,) = capsys.readouterr().err.splitlines()
  assert error.startswith("error: ") and message in error
