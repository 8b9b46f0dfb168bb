"""Feeds mutated input files to their readers, with limits on time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from pathlib import Path
import resource
import signal
import struct
import zipfile

import numpy as np

from tools.faults.table import outcome, Row
from tpugraphs_jax import hlo, submission
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import tuning_data
from tpugraphs_jax.rankers import model_file

_SECONDS = 20.0  # limit for one input; on a quiet machine an input takes less than 1 s


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
  """Data after one random mutation of bytes, a span, an 8-byte integer or the end of the data."""
  data, kind = bytearray(data), rng.integers(7)
  at, span = int(rng.integers(len(data) + 1)), int(rng.integers(1, 40))
  if kind < 2:
    for place in rng.integers(len(data), size=rng.integers(1, 4)):
      data[place] = rng.integers(256)
  elif kind == 2:
    data[at : at + span] = rng.bytes(len(data[at : at + span]))
  elif kind == 3:
    del data[at : at + span]
  elif kind == 4:
    data[at:at] = data[at : at + span] * int(rng.integers(1, 4))
  elif kind == 5:
    data[at : at + 8] = struct.pack("<q", int(rng.choice([-1, 2**31, 2**62, 10**11])))
  else:
    del data[at:]
  return bytes(data)


def repacked(path: Path, target: Path, rng: np.random.Generator) -> None:
  """Writes a copy of a zip archive with one mutated member, whose checksum is right."""
  with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
    chosen = rng.integers(len(source.namelist()))
    for number, name in enumerate(source.namelist()):
      data = source.read(name)
      if number == chosen:  # mostly in the header, which holds the size of the array
        data = mutated(data[:128], rng) + data[128:] if rng.random() < 0.7 else mutated(data, rng)
      copy.writestr(name, data)


class Hung(BaseException):
  """Something that takes too long. No `Exception`, since the code under test would handle it."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
  """Raises `Hung` in a block that takes longer."""

  def hung(*_: object) -> None:
    raise Hung

  previous = signal.signal(signal.SIGALRM, hung)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def limited_outcome(read: Callable[[], object]) -> str:
  """As `table.outcome`, of a reader that may hang."""
  try:
    with limit(_SECONDS):
      return outcome(read)
  except Hung:
    return f"took more than {_SECONDS} s"


def try_reader(
  row: Row,
  source: Path,
  target: Path,
  read: Callable[[Path], object],
  *,
  times: int,
  rng: np.random.Generator,
) -> None:
  """Reads `times` mutated copies of a file, which may raise peak memory by 1 GiB at most."""
  data, before = source.read_bytes(), _peak_bytes()
  for number in range(times):
    if zipfile.is_zipfile(source) and number % 2:
      repacked(source, target, rng)
    else:
      target.write_bytes(mutated(data, rng))
    row.count(limited_outcome(lambda: read(target)), of=f"{source.name} {number}")
  if _peak_bytes() - before > 2**30:
    row.failures.append(f"{source.name}: took {(_peak_bytes() - before) / 2**30:.1f} GiB")


def _peak_bytes() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def readers(
  tile: Path, layout: Path, results: Path, model: Path, protobufs: Path
) -> Iterator[tuple[str, Path, Callable[[Path], object]]]:
  """Yields the name of each kind of input, a valid file and its reader."""
  yield "tile graph", tile, npz.read_tile
  yield "layout graph", layout, npz.read_layout
  yield "submission", results, submission.read_results
  yield "model file", model, model_file.read_file
  yield "HLO module", protobufs / "fuzz06.hlo.pb", lambda path: hlo.featurize(path.read_bytes())
  yield "tuning data of layouts", protobufs / "synth_layout_tuning.pb", tuning_data.read_tuning
  yield "tuning data of tiles", protobufs / "synth_op_tuning.pb", tuning_data.read_tuning
