r"""Downloads the released collections: resumes, verifies, unpacks.

  python -m tpugraphs_jax.data.download --data_root ~/data/tpugraphs/npz \
      --collections tile:xla layout:xla:random

A run downloads an archive to `<archive>.part` in the data folder. The next run continues an
interrupted download. The folder of a collection appears only after its archive was unpacked
completely. A run does not touch an existing folder.

No maintained library does this: pooch, fsspec, urllib3 and requests restart after a broken
connection, and huggingface_hub resumes from its own servers only.
"""

from __future__ import annotations

from collections.abc import Sequence
import email.message
import http
import http.client
import os
from pathlib import Path
import re
import shutil
import sys
import tarfile
import time
from typing import NamedTuple
import urllib.error
import urllib.request
import zlib

from tpugraphs_jax import datasets, graph
from tpugraphs_jax.data import npz
from tpugraphs_jax.infra import console, files

BASE_URL = "http://download.tensorflow.org/data/tpu_graphs/v0/"


class Published(NamedTuple):
  """The size of a released collection.

  Attributes:
    graphs: numbers of graphs in train, valid and test.
    gigabytes: 10^9 bytes of the unpacked files of all splits, measured.
    store_gigabytes: upper bound of the size of the store, from the published numbers of nodes,
      configurations and configurable nodes; tile collections have no store.
  """

  graphs: tuple[int, int, int]
  gigabytes: float
  store_gigabytes: float = 0.0


PUBLISHED = {
  "tile:xla": Published((5709, 676, 844), 0.20),
  "layout:xla:random": Published((69, 7, 8), 0.43, 1.3),
  "layout:xla:default": Published((61, 7, 8), 0.45, 1.2),
  "layout:nlp:random": Published((207, 20, 17), 2.68, 3.3),
  "layout:nlp:default": Published((198, 20, 17), 2.57, 3.3),
}
_FUTILE_ATTEMPTS = 3
_PAUSE_SECONDS = 2.0
_TIMEOUT_SECONDS = 60.0
_BLOCK_BYTES = 1 << 20
_DISCONNECTED = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class DownloadError(RuntimeError):
  """A failed transfer or a damaged archive; the message is one line with advice."""


def archive_name(collection: str) -> str:
  """File name of the archive of a collection, such as `npz_layout_xla_random.tar`."""
  datasets.check_released(collection)
  return f"npz_{collection.replace(':', '_')}.tar"


@console.working("downloading a collection")
def download_collection(
  data_root: str | os.PathLike[str], collection: str, *, base_url: str = BASE_URL
) -> Path:
  """Downloads and unpacks one collection, unless its folder exists; returns the folder.

  An archive that is already in `data_root` is unpacked without a download. The archive is removed
  after it was unpacked.

  Args:
    data_root: folder of `tile/` and `layout/`.
    collection: one of `datasets.RELEASED`.
    base_url: URL of the folder of the archives.

  Raises:
    DownloadError: the server cannot be reached, or the archive is damaged. The next call continues
      an interrupted transfer. A damaged archive is removed if this call has downloaded it.
    ValueError: an unknown collection, or a `base_url` that is not of HTTP.
  """
  name = archive_name(collection)
  if not base_url.startswith(("http://", "https://")):
    raise ValueError(
      f"base_url is {base_url!r}, expected http://... or https://...: copy archives "
      "that are on this machine into data_root"
    )
  data_root = files.expanded(data_root)
  folder = data_root.joinpath(*collection.split(":"))
  if folder.exists():
    said = f"{collection}: {folder} exists, left alone; remove it to download it again"
    print(console.printable(said))
    return folder
  files.check_way(data_root, folder)
  data_root.mkdir(parents=True, exist_ok=True)
  archive = data_root / name
  is_local = archive.exists()
  if not is_local:
    fetch(base_url.rstrip("/") + "/" + name, archive)
  try:
    _unpack(archive, folder, collection)
  except DownloadError as error:
    if is_local:
      raise DownloadError(f"{error}; delete it and run again") from error
    archive.unlink()
    raise DownloadError(
      f"{error}; deleted: run again, and check --base_url if the archive is damaged again"
    ) from error
  archive.unlink()
  _report(collection, folder)
  return folder


def fetch(url: str, path: Path) -> None:
  """Downloads to `<path>.part`, then renames to `path`; an existing part is continued.

  A broken connection is resumed, until three attempts in a row add no bytes.

  Raises:
    DownloadError: there is no connection, the server answers with an error, or the disk has no
      room.
  """
  part = path.with_name(path.name + ".part")
  futile, furthest = 0, _size(part)
  while True:
    try:
      _transfer(url, part)
      break
    except _DISCONNECTED as error:
      if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
          if part.exists() and error.headers.get("Content-Range") == f"bytes */{_size(part)}":
            break  # complete: a run ended before it renamed the part
          part.unlink(missing_ok=True)
        elif error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
          reason = console.one_line(error.reason)
          raise DownloadError(
            f"{url}: the server answers {error.code} {reason}; check --base_url"
          ) from error
      # The size is compared with the largest so far: a restarted transfer is no progress.
      futile = 0 if _size(part) > furthest else futile + 1
      furthest = max(furthest, _size(part))
      if futile == _FUTILE_ATTEMPTS:
        raise DownloadError(
          f"{url}: {console.one_line(error)}; check the network and run again, "
          f"{_size(part):,} bytes are kept"
        ) from error
      time.sleep(_PAUSE_SECONDS)
  os.replace(part, path)
  _validator_path(part).unlink(missing_ok=True)


def _transfer(url: str, part: Path) -> None:
  """Downloads over one connection, to the end of the file."""
  have, validator = _size(part), _validator_path(part)
  expected = validator.read_text() if have and validator.exists() else ""
  # With `If-Range` the server sends the whole file if it has changed.
  resume = {"Range": f"bytes={have}-", "If-Range": expected} if expected else {}
  request = urllib.request.Request(url, headers=resume)
  with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
    identity = _identity_of(response.headers)
    start, content_range = 0, response.headers.get("Content-Range", "")
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
      start = have
      if not content_range.startswith(f"bytes {have}-") or identity not in ("", expected):
        part.unlink(missing_ok=True)
        raise http.client.HTTPException(
          f"expected bytes from {have} of file {expected}, found {content_range} of {identity}"
        )
    total = None if response.length is None else start + response.length
    _check_room(part, start, total)
    if not start:  # the part and its identity are replaced together
      part.unlink(missing_ok=True)
      validator.unlink(missing_ok=True)
      if identity:
        validator.write_text(identity)
    _copy(response, part, start, total)
  if total is not None and _size(part) != total:
    raise ConnectionError(f"the connection ended at {_size(part):,} of {total:,} bytes")


def _check_room(part: Path, start: int, total: int | None) -> None:
  free = shutil.disk_usage(part.parent).free + (0 if start else _size(part))
  if total is not None and total - start > free:
    raise DownloadError(
      f"{part.parent}: the archive needs {total - start:,} more bytes, and {free:,} are free; "
      "make room or choose another --data_root"
    )


def _copy(response, part: Path, start: int, total: int | None) -> None:
  with (
    files.open_plain(part, "ab" if start else "wb") as file,
    console.working(f"downloading {part.stem}", total=total, unit="B") as work,
  ):
    work.update(start)
    # `read` would lose an incomplete block if the connection breaks.
    while block := response.read1(_BLOCK_BYTES):
      file.write(block)
      work.update(len(block))


def _identity_of(headers: email.message.Message) -> str:
  """The ETag or time of the file on the server; without one ('') transfers are not resumed."""
  etag = headers.get("ETag", "")
  return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")


def _unpack(archive: Path, folder: Path, collection: str) -> None:
  """Unpacks the `.npz` files of a collection to a temporary folder, then renames it to `folder`.

  Args:
    archive: path of the `.tar`.
    folder: folder of the collection.
    collection: name of the collection.

  Raises:
    DownloadError: the archive is damaged, incomplete, or has another collection.
  """
  staging = archive.with_name(archive.name + ".unpacking")
  files.check_way(archive.parent, staging)
  shutil.rmtree(staging, ignore_errors=True)
  try:
    _extract(archive, collection, staging)
    _verify_files(staging)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(staging, folder)
  except (DownloadError, tarfile.TarError, EOFError, zlib.error, ValueError) as error:
    raise DownloadError(f"{archive}: damaged archive ({console.one_line(error)})") from error
  finally:
    shutil.rmtree(staging, ignore_errors=True)


def _extract(archive: Path, collection: str, staging: Path) -> None:
  """Writes `npz/<collection>/<split>/<graph>.npz` to `<staging>/<split>/`."""
  folder = re.escape(collection.replace(":", "/"))
  pattern = re.compile(rf"(?:\./)?npz/{folder}/({'|'.join(graph.SPLITS)})/([^/.][^/]*\.npz)")
  with (
    tarfile.open(archive, "r:") as tar,  # an archive without compression, of known size
    console.working(f"unpacking {archive.name}", unit="files") as work,
  ):
    end = 0
    for member in tar:
      blocks = -(-member.size // tarfile.BLOCKSIZE)
      end = member.offset_data + blocks * tarfile.BLOCKSIZE
      match = pattern.fullmatch(member.name)
      if match and member.isfile():
        path = staging.joinpath(*match.groups())
        if path.exists():
          raise DownloadError(f"it has {member.name!r} twice")
        path.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None  # of a regular file
        with source, open(path, "wb") as target:
          shutil.copyfileobj(source, target, _BLOCK_BYTES)
        work.update()
      elif not member.isdir():
        said = f"{archive}: left out {member.name!r}, which is not a graph of {collection}"
        print(console.printable(said))
    # Without its end mark, an archive was cut between two files.
    tar.fileobj.seek(end)
    if tar.fileobj.read(2 * tarfile.BLOCKSIZE) != bytes(2 * tarfile.BLOCKSIZE):
      raise DownloadError("its end is missing")


def _verify_files(staging: Path) -> None:
  """Refuses a split without files, and arrays that differ from the checksums in their files."""
  for split in graph.SPLITS:
    paths = files.visible(staging, f"{split}/*.npz")
    if not paths:
      raise DownloadError(f"it has no .npz file for the split {split}")
    for path in paths:
      try:
        with npz.NpzArchive(path) as archive:
          archive.check()
      except npz.NpzError:
        raise DownloadError(f"{split}/{path.name} is not a complete .npz file") from None


def _report(collection: str, folder: Path) -> None:
  graphs = tuple(len(files.visible(folder, f"{split}/*.npz")) for split in graph.SPLITS)
  counts = "/".join(map(str, graphs))
  print(console.printable(f"{collection}: {counts} train/valid/test graphs in {folder}"))
  published = PUBLISHED[collection].graphs
  if graphs != published:
    print(f"{collection}: the published archive had {'/'.join(map(str, published))}")


def _validator_path(part: Path) -> Path:
  return part.with_name(part.name + ".id")


def _size(path: Path) -> int:
  return path.stat().st_size if path.exists() else 0


@console.command(keeps="finished files are kept: run the same command again")
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; 1 where a download failed, 2 where it was refused."""
  parser = console.parser("data.download", "Downloads the released TpuGraphs collections.")
  parser.add_argument("--data_root", default=graph.DEFAULT_DATA_ROOT, help="default: %(default)s")
  names = datasets.RELEASED
  about = f"default: all of {', '.join(names)}"
  parser.add_argument(
    "--collections", nargs="+", default=names, choices=names, metavar="NAME", help=about
  )
  parser.add_argument("--base_url", default=BASE_URL, help="a mirror; default: %(default)s")
  args = parser.parse_args(argv)
  files.refuse(args.data_root, "--data_root")
  try:
    for collection in args.collections:
      download_collection(args.data_root, collection, base_url=args.base_url)
  except (DownloadError, OSError) as error:
    print(f"error: {console.one_line(error)}", file=sys.stderr)
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
