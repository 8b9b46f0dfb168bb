"""Which files count as a finished request, which is not collected again."""

import contextlib
import dataclasses
import json
import re
import time

import numpy as np
import pytest

from tests.support import random_graphs, recorded
from tpugraphs_jax.columns import NODE_FEATURES
from tpugraphs_jax.data import npz
from tpugraphs_jax.tuning import label_file, labels, workers
from tpugraphs_jax.tuning.workers import LabelRequest

_HEADER = {"source": "a.py:net", "label": "bytes_estimate", "jax": "1", "program_sha256": "ab"}


@pytest.fixture
def asked(tmp_path):
  """A finished request with the four configurations that were asked for."""
  asked = LabelRequest(
    "a.py:net", "a_net", "valid", "layout:own:tried", str(tmp_path), "bytes_estimate", None, 4, 0, 1
  )
  rng = np.random.default_rng(0)
  sizes = dict(nodes=6, edges=7, config_nodes=[1, 3], configs=4, features=NODE_FEATURES)
  graph = random_graphs.layout_graph(rng, **sizes, name="a_net")
  npz.write_layout(asked.npz, graph)
  values = graph.configs.labels.tolist()
  _write(asked, [{"bytes_accessed": value} for value in values], split="valid", configs_asked=4)
  return asked


def _write(asked, raw, **about):
  """Writes the file of labels of a request whose configurations have these raw numbers."""
  about = {"split": "valid", "configs_asked": 4} | about
  asked.labels.unlink(missing_ok=True)
  for place, numbers in enumerate(raw):
    label_file.append(asked.labels, {**_HEADER, "numbers": [place]})
    label_file.append(asked.labels, {**_HEADER, "numbers": [place], "raw": numbers})
  about["kept"] = [[place] for place in range(len(raw))]
  label_file.append(asked.labels, {**_HEADER, "about": about})


def _is_finished(asked, header=_HEADER, label=None):
  return workers.is_finished(asked, header, label or labels.BytesEstimate())


def test_files_that_are_whole_and_of_the_same_program_are_finished(asked):
  assert _is_finished(asked)
  assert not _is_finished(asked, _HEADER | {"jax": "2"})


def test_an_unfinished_program_has_no_labels_of_configurations(asked):
  *lines, _ = asked.labels.read_bytes().splitlines(keepends=True)
  asked.labels.write_bytes(b"".join(lines))
  assert not _is_finished(asked)


@pytest.mark.parametrize("key", list(_HEADER))
def test_another_program_label_or_version_is_not_finished(asked, key):
  assert not _is_finished(asked, _HEADER | {key: "other"})


@pytest.mark.parametrize(
  "raw, fields",
  [
    (None, {"configs_asked": 3}),
    (None, {"split": "train"}),
    ([], {}),
    ([{"bytes_accessed": 1}] * 4, {}),
    ([{"seconds": 1}] * 4, {}),
  ],
)
def test_another_number_split_or_label_is_not_finished(asked, raw, fields):
  configs = label_file.collected(asked.npz)["configs"]
  _write(asked, configs if raw is None else raw, **fields)
  assert not _is_finished(asked)


@pytest.mark.parametrize("kind", ["npz", "labels"])
@pytest.mark.parametrize("data", [None, b"", b"half of a fi"])
def test_missing_and_damaged_files_are_not_finished(asked, kind, data):
  path = getattr(asked, kind)
  path.unlink()
  if data is not None:
    path.write_bytes(data)
  assert not _is_finished(asked)


def test_times_are_finished_and_estimates_of_earlier_versions_are_not(asked):
  label = labels.TpuEstimate("tpu:v6e")
  values = npz.read_layout(asked.npz).configs.labels.tolist()
  raw = [{"milliseconds": value / 1e9, "kernels": []} for value in values]
  _write(asked, raw)
  assert _is_finished(asked, label=label)
  _write(asked, [raw[0] | {"optimal_seconds": 1e-6}, *raw[1:]])
  assert not _is_finished(asked, label=label)


@pytest.mark.parametrize(
  "error, status", [(ValueError("no dot"), workers.FAILED), (TypeError("no dot\nand more"), 1)]
)
def test_any_error_of_a_program_is_its_reason(asked, error, status, monkeypatch, capsys):
  def fails(_):
    raise error

  monkeypatch.setattr(workers.tasks, "end_with_parent", lambda: None)
  monkeypatch.setattr(workers, "label_program", fails)
  ends = contextlib.nullcontext() if status == workers.FAILED else pytest.raises(TypeError)
  with ends:
    assert workers.main([json.dumps(dataclasses.asdict(asked))]) == status
  asked.log.parent.mkdir(parents=True, exist_ok=True)
  asked.log.write_text(capsys.readouterr().err + "Traceback\n")
  assert re.fullmatch("a_net: (TypeError: )?no dot", workers._reason(asked, status))


@pytest.mark.parametrize("link", ["npz", "logs/layout", "logs/layout/own/tried/valid"])
def test_no_file_of_a_program_is_written_through_a_linked_folder(tmp_path, link):
  (tmp_path / "target").mkdir()
  (tmp_path / "out" / link).parent.mkdir(parents=True)
  (tmp_path / "out" / link).symlink_to(tmp_path / "target")
  out = str(tmp_path / "out")
  request = LabelRequest(
    "a.py:net", "a_net", "valid", "layout:own:tried", out, "bytes_estimate", None, 4, 0
  )
  for collect in (workers.label_program, lambda request: workers.run([request], processes=1)):
    with pytest.raises(ValueError, match="a link to"):
      collect(request)
  assert not list((tmp_path / "target").iterdir())


def test_the_log_of_a_worker_is_not_written_through_a_link(tmp_path, asked):
  asked.log.parent.mkdir(parents=True)
  asked.log.symlink_to(tmp_path / "precious")
  with pytest.raises(ValueError, match="a link to"):
    workers.run([asked], processes=1, progress=False)
  assert not (tmp_path / "precious").exists()


_PROGRAM = """
import jax
import jax.numpy as jnp

PROGRAMS = {
  "net": (lambda x, w: jnp.tanh(x @ w).T @ x, tuple(
    jax.ShapeDtypeStruct(shape, "float32") for shape in ((128, 256), (256, 512)))),
}
"""


@recorded.needs_libtpu
def test_programs_for_a_tpu_are_labelled_by_the_times_of_their_schedules(tmp_path):
  (tmp_path / "one.py").write_text(_PROGRAM)
  asked = LabelRequest(
    f"{tmp_path / 'one.py'}:net",
    "net",
    "train",
    "layout:own:t",
    str(tmp_path),
    "tpu_estimate",
    "v6e",
    3,
    0,
  )
  assert not workers.collect(asked)
  configs = label_file.collected(asked.npz)["configs"]
  graph = npz.read_layout(asked.npz)
  runtimes, kernels = graph.configs.labels, graph.configs.kernels
  assert runtimes.tolist() == [round(raw["milliseconds"] * 1e9) for raw in configs]
  assert (0 < kernels.runtime.sum(axis=1)).all() and (kernels.runtime.sum(axis=1) <= runtimes).all()
  assert set(graph.config_node.tolist()) <= set(kernels.node[:, 1].tolist())


def test_ctrl_c_ends_workers_at_once_and_counts_no_choice_as_failed(asked, tmp_path, monkeypatch):
  begun = json.dumps(label_file.files.seal({**_HEADER, "numbers": [9]}))
  script = tmp_path / "worker.sh"
  script.write_text(
    f"#!/bin/sh\necho '{begun}' >> {asked.labels}\nkill -INT $PPID\nexec sleep 90\n"
  )
  script.chmod(0o700)
  monkeypatch.setattr(workers.tasks, "python_command", lambda *arguments: [str(script)])
  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    workers.run([asked], processes=1, progress=False)
  assert time.monotonic() - start < 30
  assert label_file.interrupted(asked.labels)["numbers"] == [9]
