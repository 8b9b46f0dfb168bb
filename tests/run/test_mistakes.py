"""Mistakes on the command line end in one line, never in a traceback."""

import shutil

import pytest

from tests.support import commands, small_runs
from tests.support.small_runs import COLLECTIONS, COMMANDS
from tpugraphs_jax.data import npz

SKIPPED = "a skipped file"  # the only run that must succeed


def flags(kind, done, workdir, *more, config=None):
  script, default = COMMANDS[kind]
  return [
    script,
    f"--config={config or default}",
    f"--data_root={done.data_root}",
    f"--workdir={workdir}",
    "--config.model.hidden_dim=8",  # the small runs have compiled these programs
    *more,
  ]


def damaged(done, folder, kind, *, split, keep=0):
  """A copy of the data whose files of a split are cut short, but for the first few."""
  root = shutil.copytree(done.data_root, folder / f"damaged_{kind}_{split}")
  for path in npz.split_files(root, COLLECTIONS[kind], split)[keep:]:
    path.write_bytes(path.read_bytes()[:500])
  return root


def without(done, folder, kind, split):
  root = shutil.copytree(done.data_root, folder / f"without_{kind}_{split}")
  shutil.rmtree(root.joinpath(*COLLECTIONS[kind].split(":"), split))
  return root


# Name: a flag of the command for tiles, and a part of the error line.
SIMPLE = {
  "field": ("--config.nope=1", "the config has no field 'nope'"),
  "field, nearly": (
    "--config.optimizer.learning_rat=1",
    "did you mean optimizer.learning_rate? --print_config",
  ),
  "integer": ("--config.seed=x", "--config.seed=x: invalid literal"),
  "section": ("--config.data=3", "the config has no field 'data'"),
  "graphs": ("--config.batch.graphs=0", "batch.graphs is 0"),
  "loss without weight": (
    "--config.loss.losses=MSE",
    "--config.loss.losses is 'MSE', expected NAME:WEIGHT, as in MSE:1",
  ),
  "task": ("--config.task=layout", "the config has no field 'task'"),
  "typing error": ("--wrokdir=x", "Unknown command line flag 'wrokdir'. Did you"),
  "do": ("--do=evaluate,x", "expected some of train,evaluate,predict"),
  "other command": ("--config=configs/layout.py:ci", "run run_layout.py"),
  "argument": ("train", "unexpected argument 'train'; options start with --"),
  "process": ("--num_processes=2", "several processes need all of --coordinator_addr"),
  "split": ("--split=valid", "--split goes with --do=evaluate or predict"),
  "ensemble": ("--ensemble=a,b", "--ensemble goes with --do=evaluate or predict"),
  "profile": ("--config.profile_steps=9", "profile_steps is '9'"),
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
  """Command and part of the error line of every mistake, by name."""
  folder, done = tmp_path_factory.mktemp("mistakes"), small_runs.all_runs()
  new = lambda: folder / f"workdir_{len(runs)}"
  runs = {}
  for name, (flag, line) in SIMPLE.items():
    runs[name] = flags("tile", done, new(), flag), line
  runs["variant"] = (
    flags("tile", done, new(), config="configs/tile.py:nope"),
    "configs/tile.py has no variant 'nope'; it has recommended, EarlyJoinSAGE",
  )
  runs["config file"] = (flags("tile", done, new(), config="configs/nope.py"), "configs/nope.py")
  runs["printed task"] = (
    flags("tile", done, new(), "--print_config", "--config.task=layout"),
    "the config has no field 'task'",
  )
  runs["no workdir"] = ["run_tile.py"], "--workdir is missing: name a folder"
  runs["no data"] = (
    ["run_tile.py", f"--workdir={new()}"],
    "there is no data at ~/data/tpugraphs/"
    "npz: download it (python -m tpugraphs_jax.data.download --data_root ~",
  )
  runs["two sources"] = (
    flags("tile", done, new(), "--synthetic"),
    "--synthetic generates the data: give it or --data_root",
  )
  runs["bucket"] = (
    ["run_tile.py", "--workdir=zz://a/b"],
    "zz://a/b cannot be reached (Protocol not known: zz)",
  )
  runs["data_root"] = (
    ["run_tile.py", "--data_root=/nowhere", f"--workdir={new()}"],
    "data_root /nowhere is not a folder",
  )
  file = folder / "file"
  file.touch()
  runs["workdir is a file"] = flags("tile", done, file), str(file)
  runs["indices"] = (
    flags("layout", done, new(), f"--config.eval.indices_dir={folder}"),
    "xla_random.json is missing: --config.eval.indices_dir",
  )
  runs["evaluate untrained"] = (
    flags("tile", done, new(), "--do=evaluate"),
    "config.json is missing: name a folder that a model was",
  )
  whole = done.workdir("tile_whole")
  runs["used workdir"] = (
    flags("tile", done, whole),
    "holds a run already (checkpoint of step 12): go on with --resume, or give another --workdir",
  )
  runs["another config"] = (
    flags("tile", done, whole, "--resume", "--config.seed=3"),
    "checkpoint of another config: ",
  )
  runs["evaluate another config"] = (
    ["run_tile.py", f"--workdir={whole}", "--do=evaluate", "--config.loss.temperature=3"],
    "checkpoint of another config: --config.loss.temperature is 10.0 there and 3.0 here",
  )
  runs["not finite"] = (
    flags("tile", done, new(), "--config.optimizer.learning_rate=1e30"),
    "lower --config.optimizer.learning_rate or set --config.optimizer.clip_norm",
  )
  root = damaged(done, folder, "tile", split="valid", keep=3)
  lenient = "--do=train", "--config.data.skip_bad_files=True", "--config.train.epochs=1"
  runs[SKIPPED] = flags("tile", done, new(), f"--data_root={root}", *lenient), ""
  for kind, split, line in (
    ("layout", "train", "no .npz file in "),
    ("tile", "valid", "no .npz file in "),
    ("layout", "test", "--do=train,evaluate needs no test split"),
  ):
    root = without(done, folder, kind, split)
    runs[f"{kind} without {split}"] = flags(kind, done, new(), f"--data_root={root}"), line
  root = shutil.copytree(done.data_root, folder / "named")
  path = npz.split_files(root, COLLECTIONS["tile"], "test")[0]
  path.rename(path.with_name("=a,b.npz"))
  runs["tile of another name"] = (
    flags("tile", done, new(), f"--data_root={root}"),
    "the name '=a,b' has ','",
  )
  root = damaged(done, folder, "tile", split="train")
  runs["tile truncated"] = (
    flags("tile", done, new(), f"--data_root={root}"),
    "--config.data.skip_bad_files=True leaves such files out",
  )
  root = damaged(done, folder, "layout", split="train")
  runs["layout all truncated"] = (
    flags("layout", done, new(), f"--data_root={root}", "--config.data.skip_bad_files=True"),
    "are malformed",
  )
  return runs


@pytest.fixture(scope="module")
def ended(mistakes):
  done = small_runs.all_runs()
  before = snapshot(done.workdir("tile_whole"))
  runs = [commands.Run(arguments) for arguments, _ in mistakes.values()]
  results = commands.run_all(runs, home=done.folder / "home_tile")
  return dict(zip(mistakes, results)) | {"before": before}


def snapshot(folder):
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_mistake_ends_in_one_line(mistakes, ended):
  for name, (_, line) in mistakes.items():
    if name != SKIPPED:
      result = ended[name]
      assert result.code == 2, (name, result.err)
      assert "Traceback" not in result.err, (name, result.err)
      # The loss becomes infinite in training.
      assert "step 1" not in result.out or name == "not finite", name
      assert line in result.complaint, name


def test_a_refused_run_leaves_the_working_folder_as_it_was(ended):
  assert snapshot(small_runs.all_runs().workdir("tile_whole")) == ended["before"]


def test_skipped_files_are_named_and_the_job_goes_on(ended):
  result = ended[SKIPPED]
  assert result.code == 0, result.err
  (named,) = [line for line in result.err.splitlines() if "not a complete .npz archive" in line]
  assert "skipped " in named and COLLECTIONS["tile"].replace(":", "/") in named
  assert "skipped 1 of 4 files in" in result.err
