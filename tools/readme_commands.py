"""Runs the commands and the Python of README.md and docs/ on tiny data: part of CI.

    python -m tools.readme_commands
    python -m tools.readme_commands README.md docs/tutorial.md    (these pages alone)

Changed are only the size (variant `ci`, scale `tiny`, one epoch), the data and where files go; one
run draws its report page. Commands for the network and for hours (benchmarks) are asked for
`--help`. A command that stands on two pages runs once. Pages of `ELSEWHERE` have tests of their
own, as notebooks do. Links are followed in the pages at the top; the site checks those between
pages. README has at most 800 words, the pages without the records 17,000.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
import re
import shlex
import sys
import tempfile
import time

from flax import traverse_util
import numpy as np

from tests.support import commands, saved_models
import tpugraphs_jax
from tpugraphs_jax.rankers import official_weights

ROOT = Path(__file__).parents[1]
DATA = "~/data/tpugraphs/npz"  # as the README writes it
_ONLY_HELP = (
  "tpugraphs_jax.data.download",
  "tpugraphs_jax.collect",
  "tpugraphs_jax.estimate",
  "tpugraphs_jax.tune_tiles",
  "tpugraphs_jax.sweep",
  "tpugraphs_jax.leaderboard",
  "out/folds",  # which a sweep makes
  "benchmarks.",
)
# These pages make files that others use; the others follow by name.
_FIRST = ("docs/data.md", "docs/tutorial.md", "README.md", "docs/index.md", "docs/training.md")
# Tested elsewhere: `tests/docs` runs the recipes and the pages that need the TPU compiler, and
# `tests/test_examples.py` the examples of the Python interface and of `examples/`.
ELSEWHERE = {"docs/add_your_own.md", "docs/add_parts.md", "docs/api.md", "docs/own_loop.md"}
_PYTHON_ELSEWHERE = {
  "README.md",
  "docs/estimate.md",
  "docs/own_programs.md",
  "docs/tiles.md",
  "docs/training_loop.md",
  "docs/tune.md",
}
_SAVED_MODEL = "out/model_HASH"  # stands for a folder of TensorFlow; has the weights of the page
# Files that stand for the reader's own in the Python of pages.
_OWN_FILES = {"kernel.npz": "tile/xla", "program.npz": "layout/xla/random"}
_OWN_MODULE = ("step.hlo.pb", f"{ROOT}/tests/data/frameworks/tensorflow.hlo.pb")


def pages() -> list[str]:
  """README.md and the pages of docs/, in the order in which they run."""
  known = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
  return [*_FIRST, *sorted(known - ELSEWHERE - set(_FIRST))]


def commands_of(page: str) -> list[str]:
  """The shell commands in the fenced blocks of a page, without comments."""
  blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
  lines = [
    line.split("  #")[0].strip()
    for language, block in blocks
    if not language
    for line in block.splitlines()
  ]
  return [line for line in lines if line.startswith("python ")]


def small(command: str, out: Path) -> str:
  """The command on tiny data in `out`."""
  if any(name in command for name in _ONLY_HELP):
    return " ".join(command.split()[: 3 if " -m " in command else 2]) + " --help"
  command = re.sub(
    r"(--config=\S+?\.py)(:\S+)?",
    lambda found: found[1] + (f"{found[2]},ci" if found[2] else ":ci"),
    command,
  )
  has_data = any(flag in command for flag in (DATA, "--data_root", "--synthetic"))
  if command.startswith("python run_") and not has_data and "--print_config" not in command:
    command += f" --data_root={DATA}"
  if command.startswith("python run_") and "--workdir=out/tile" not in command:
    command += " --noreport"  # a page takes longer than most runs here
    if "--do" not in command and "train.epochs" not in command:
      command += " --config.train.epochs=1"
  command = command.replace("--scale medium", "--scale tiny").replace(*_OWN_MODULE)
  command = re.sub(r"(?<=[ =])(?=submission.csv)", f"{out}/", command)
  if _SAVED_MODEL in command:
    saved_models.write(out / "model_HASH", official_weights_of(out / "late"))
  if "tpugraphs_jax.view" in command:  # which serves a page until it is interrupted
    command = with_files(command, out) + " --table"
  return re.sub(r"(?<=[ =,])out/", f"{out}/", command).replace(DATA, f"{out}/synthetic/npz")


def official_weights_of(workdir: Path) -> list[np.ndarray]:
  """The weights of a trained official model, in the order of Keras."""
  ranker = tpugraphs_jax.load(workdir)
  flat = traverse_util.flatten_dict(ranker.params)
  return [flat[path] for path in official_weights.weight_order(ranker.family.network)]


def with_files(text: str, out: Path) -> str:
  """A text with files in `out` in place of the reader's own."""
  for name, folder in _OWN_FILES.items():
    found = sorted((out / "synthetic/npz" / folder / "valid").glob("*.npz"))
    text = text.replace(name, str(found[0]) if found else name)
  return text


def run(title: str, command: str) -> None:
  """Runs a command in the top folder; its output is shown if it fails."""
  print(f"$ {title}", flush=True)
  started = time.monotonic()
  words = [
    name
    for word in shlex.split(command)[1:]
    for name in (sorted(glob.glob(word)) if "*" in word else [word])
  ]
  ended = commands.run(commands.Run(words), home=Path.home())
  print(f"  {time.monotonic() - started:.0f} s", flush=True)
  said = f"{ended.out[-2000:]}{ended.err[-2000:]}"
  if ended.code:
    sys.exit(f"{said}\nerror: exit code {ended.code} of {title}")
  if "pip install" in said:
    sys.exit(f"{said}\nerror: {title} misses a package that its page has not installed")


def python_of(page: str, out: Path) -> str:
  """The Python of a page in one piece, with its files in `out`."""
  code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
  code = with_files(code, out)
  code = code.replace(*_OWN_MODULE).replace(DATA, f"{out}/synthetic/npz")
  return code.replace('"out/', f'"{out}/')


def anchors(page: Path) -> set[str]:
  """The anchors of a page's headings, as Markdown renderers make them."""
  titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_links() -> None:
  """Raises SystemExit where a link of a page outside the site leads nowhere."""
  for page in map(
    ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "SECURITY.md")
  ):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
      name, _, anchor = target.partition("#")
      found = ROOT / name if name else page
      if target.startswith("http"):
        continue
      if not found.exists() or anchor and anchor not in anchors(found):
        sys.exit(f"error: {page.name}: a link leads nowhere: {target}")


def check_lengths() -> None:
  """Raises SystemExit where README, or the pages without the records, are too long to be read."""
  for name, paths, most in (
    ("README.md", [ROOT / "README.md"], 800),
    ("docs/*.md", [*(ROOT / "docs").glob("*.md")], 17_000),
  ):
    words = sum(len(path.read_text().split()) for path in paths)
    if words > most:
      sys.exit(f"error: {name}: {words:,} words, expected at most {most:,}")


def main(asked: list[str]) -> None:
  check_links()
  check_lengths()
  ran: set[str] = set()
  with tempfile.TemporaryDirectory() as folder:
    out = Path(folder)
    os.environ.setdefault(commands.COMPILED, str(out / "compiled"))
    os.chdir(ROOT)
    for page in asked or pages():
      text = (ROOT / page).read_text()
      for command in commands_of(text):
        if command not in ran:
          run(command, small(command, out))
          ran.add(command)
      if "```python" in text and page not in _PYTHON_ELSEWHERE:
        (out / "page.py").write_text(python_of(text, out))
        run(f"the Python of {page}", f"python {out / 'page.py'}")
        ran.add(page)
  print(f"{len(ran)} commands and programs of pages ran")


if __name__ == "__main__":
  main(sys.argv[1:])
