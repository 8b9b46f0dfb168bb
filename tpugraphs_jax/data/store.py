"""The random-access store of the layout collections: built once, then mapped.

A released layout file is deflated, and its configurations take 72 bytes per configurable node. The
store keeps every configuration, without loss, as one small integer per group of nodes in a
memory-mapped file. A program can read any configurations without the rest of the file.

    python -m tpugraphs_jax.data.store build --data_root ~/data/tpugraphs/npz

The store has a folder for each graph (`data.graph_folder`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
from pathlib import Path
import sys

from absl import logging

from tpugraphs_jax import graph
from tpugraphs_jax.data import graph_folder, npz
from tpugraphs_jax.datasets import Collection, OWN, RELEASED
from tpugraphs_jax.infra import console, files, tasks

# Bytes of files below which starting processes takes longer than the work.
_WORTH_PROCESSES = 4 << 20


def graph_folders(
  data_root: str | os.PathLike[str],
  collection: str,
  split: str,
  *,
  store_dir: str | os.PathLike[str] | None = None,
) -> dict[Path, Path]:
  """The folder in the store of every file of a split.

  The store is in `store_dir`, by default `<data_root>/store`, and has the
  folders of the data: `layout/xla/random/train/<graph>`.

  Raises:
    ValueError, FileNotFoundError: as `npz.split_files`; `collection` is no
      layout collection; `store_dir` is in a bucket.
  """
  if store_dir is not None:
    files.refuse(store_dir, "the folder of the store")
  paths = npz.split_files(data_root, collection, split)
  parsed = Collection(collection)
  if parsed.kind != "layout":
    raise ValueError(
      f"collection {collection} has no store: its files are small and are "
      "read as they are; a store is for layout collections"
    )
  root = files.local_of(data_root) / "store" if store_dir is None else files.local_of(store_dir)
  folder = parsed.folder(root, split)
  return {file: folder / file.stem for file in paths}


def ensure_store(
  data_root: str | os.PathLike[str],
  collection: str,
  split: str,
  *,
  store_dir: str | os.PathLike[str] | None = None,
  workers: int | None = None,
  skip_bad_files: bool = False,
  beam: Sequence[str] | None = None,
) -> list[Path]:
  """Builds missing graphs of a split; returns the folders of all graphs, sorted by name.

  A graph is built again if its folder is damaged or its file has changed. Finished graphs stay when
  the build is interrupted or fails. A second process for the same split waits for the first. A
  store in a bucket is copied to this machine first, and new graphs are sent to the bucket.

  Args:
    data_root: the folder with the released `layout/` folder.
    collection: such as `layout:xla:random`.
    split: `train`, `valid` or `test`.
    store_dir: where the store is; `<data_root>/store` by default.
    workers: processes, one file each at a time; by default one per CPU, or one if there is little
      to do. They are spawned: a script needs `if __name__ == "__main__"`.
    skip_bad_files: leave out malformed files, with a warning, instead of raising.
    beam: flags of Apache Beam to build graphs on a cluster; None = on this machine.

  Raises:
    ValueError, FileNotFoundError: as `graph_folders`; a file is malformed; or a folder on the way
      to the graphs is a link.
    OSError: the store cannot be written.
    ImportError: `beam` without Apache Beam installed.
  """
  if workers is not None and workers < 1:
    raise ValueError(f"workers is {workers}, expected at least 1")
  folders = graph_folders(data_root, collection, split, store_dir=store_dir)
  root = next(iter(folders.values())).parent
  files.check_way(files.local_of(data_root if store_dir is None else store_dir), root)
  bad: dict[Path, npz.NpzError] = {}
  if _outdated(folders):
    with _build_lock(root):
      files.tidy(root)
      todo = _outdated(folders)  # again: another process may have built some
      for file, reason in todo.items():
        if folders[file].exists():
          logging.warning(f"{reason}: this graph is built again, in {root}")
      folder_of = {file: folders[file] for file in todo}
      name, stop = f"{collection} {split}", not skip_bad_files
      bad = _build(folder_of, workers=workers, beam=beam, stop_at_error=stop, name=name)
  for error in bad.values():
    logging.warning(f"skipped {error}")
  return [folder for file, folder in folders.items() if file not in bad]


def _outdated(folders: dict[Path, Path]) -> dict[Path, str]:
  """The files whose graphs have to be built, with the reasons."""
  with (
    console.working("comparing files with the store"),
    concurrent.futures.ThreadPoolExecutor() as pool,  # the first time reads every file
  ):
    reasons = pool.map(graph_folder.why_outdated, folders.values(), folders)
    return {file: reason for file, reason in zip(folders, reasons) if reason}


@contextlib.contextmanager
def _build_lock(root: Path) -> Iterator[None]:
  """Allows one builder per split; the lock ends with its process."""
  # In a script without a main guard each spawned process runs the script again, and would wait
  # forever for the lock of the first process.
  if getattr(multiprocessing.current_process(), "_inheriting", False):
    raise RuntimeError(
      "the store is built by several processes, each of which imports the "
      'calling script: put its work under `if __name__ == "__main__":`'
    )
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(files.hold(root, wait=True))
    except OSError as error:
      raise OSError(
        f"cannot write the store {root} ({error.strerror}); name another folder with store_dir"
      ) from error
    yield


def _build(
  todo: dict[Path, Path],
  *,
  workers: int | None,
  stop_at_error: bool,
  name: str,
  beam: Sequence[str] | None = None,
) -> dict[Path, npz.NpzError]:
  """Builds graphs, the largest files first; returns the malformed files with their errors.

  Args:
    todo: folder in the store of every file to read.
    workers: processes on this machine; by default one per CPU, or one if there is little to do.
    stop_at_error: the first malformed file ends the build.
    name: of what is stored.
    beam: flags of Apache Beam to build graphs on a cluster; None = on this machine. The cluster
      must have files and store under the same paths.

  Raises:
    npz.NpzError: a file is malformed, with `stop_at_error`.
    OSError: the store cannot be written, or a process was killed.
    ImportError: Beam is not installed.
  """
  largest_first = sorted(todo.items(), key=lambda item: item[0].stat().st_size, reverse=True)
  size = sum(file.stat().st_size for file, _ in largest_first)
  if workers is None:
    workers = 1 if size < _WORTH_PROCESSES and beam is None else os.cpu_count() or 1
  if beam is not None:
    tasks.run(_build_on_cluster, largest_first, processes=workers, beam=beam)
    workers = 1  # checks every graph, and builds graphs that failed on the cluster
  bad = {}
  with console.working(f"storing {name}", total=size, unit="B") as work:

    def finished(built: tuple[Path, npz.NpzError | None]) -> None:
      file, error = built
      if error is not None and stop_at_error:
        raise error
      if error is not None:
        bad[file] = error
      work.update(file.stat().st_size)

    tasks.run(_build_graph, largest_first, processes=workers, finished=finished)
  return bad


def _build_on_cluster(task: tuple[Path, Path]) -> None:
  """Builds a graph on a cluster; after an error this machine builds it again."""
  with contextlib.suppress(OSError):
    _build_graph(task)


def _build_graph(task: tuple[Path, Path]) -> tuple[Path, npz.NpzError | None]:
  """Builds one graph of the store; returns its file, and the error if it is malformed."""
  file, folder = task
  if not graph_folder.why_outdated(folder, file):  # built on a cluster
    return file, None
  state = graph_folder.fingerprint(file)
  try:
    op_graph = npz.read_layout(file)
  except npz.NpzError as error:
    return file, error
  graph_folder.write(folder, op_graph, source=file, source_state=state)
  return file, None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  flags, beam = tasks.split_flags(argv)
  about = "-- and flags of Apache Beam, such as --runner=FlinkRunner: a cluster builds it"
  title = "Builds the random-access store of the layout collections."
  parser = console.parser("data.store", title, epilog=about)
  parser.add_argument("command", choices=("build",))
  parser.add_argument(
    "--data_root", default=graph.DEFAULT_DATA_ROOT, help="released files (default: %(default)s)"
  )
  parser.add_argument("--store_dir", help="folder of the store (default: DATA_ROOT/store)")
  parser.add_argument(
    "--collection",
    help="default: every layout collection in DATA_ROOT; own ones in a bucket have to be named",
  )
  parser.add_argument("--split", choices=graph.SPLITS, help="default: all that are there")
  parser.add_argument("--workers", type=int, help="processes (default: one per CPU)")
  parser.add_argument(
    "--skip_bad_files", action="store_true", help="name malformed files and go on (default: stop)"
  )
  return parser.parse_args(flags, argparse.Namespace(beam=beam))


def _splits_to_build(args: argparse.Namespace) -> list[tuple[str, str]]:
  """The pairs (collection, split) of the flags, by default all that have files."""
  splits = [args.split] if args.split else graph.SPLITS
  root = files.local_of(args.data_root)
  names = [args.collection] if args.collection else _layout_collections(root)
  pairs = list(itertools.product(names, splits))
  # Without files, the error of the first pair names the missing folder.
  return [pair for pair in pairs if npz.files_there(args.data_root, *pair)] or pairs[:1]


def _layout_collections(root: Path) -> list[str]:
  """The released layout collections, and the own ones under `root`."""
  names = sorted(path.name for path in root.glob(f"layout/{OWN}/[A-Za-z0-9]*") if path.is_dir())
  released = [name for name in RELEASED if Collection(name).kind == "layout"]
  return released + [f"layout:{OWN}:{name}" for name in names]


@console.command(keeps="graphs that are stored are kept: run the same command again")
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  args = _parse(sys.argv[1:] if argv is None else argv)
  names = ("store_dir", "workers", "skip_bad_files", "beam")
  options = {name: getattr(args, name) for name in names}
  for collection, split in _splits_to_build(args):
    folders = graph_folders(args.data_root, collection, split, store_dir=args.store_dir)
    print(console.printable(f"{collection} {split}: {next(iter(folders.values())).parent}"))
    built = ensure_store(args.data_root, collection, split, **options)
    print(f"{len(built)} of {len(folders)} graphs built")
  return 0


if __name__ == "__main__":
  from tpugraphs_jax.data import store  # other processes find functions by this module's name

  sys.exit(store.main())
