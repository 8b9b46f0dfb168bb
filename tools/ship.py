r"""Adds a trained ranker of layouts to the models that ship, with its card.

    python -m benchmarks.own_quality --workdir out/own_quality --out benchmarks/own_quality.json
    python -m tools.ship --run out/own_quality/recommended/0 --data_root data/own/npz \
        --seeds benchmarks/own_quality.json
    python -m tools.ship --run out/own_quality_cpu/official/0 --name layout-cpu-measured

The card names the training data, as recorded beside the data, and gives the
model's figures on the programs that it was not trained on, which this script computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import own_quality, own_times
from tpugraphs_jax.data import npz
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.tuning import label_file

_MOST_BYTES = 1 << 20
_SPLITS = ("train", "valid", "test")
_NAMES = own_quality.VARIANTS | {key: name for key, (name, *_) in own_times.VARIANTS.items()}
_FACTS = "label target platform device config_runtime jax libtpu simulator".split()


def facts(paths: Sequence[Path]) -> dict[str, Any]:
  """The facts about the labels, which all programs have to agree on.

  Raises:
    ValueError: two programs differ.
  """
  facts: dict[str, Any] = {}
  for path in paths:
    record = label_file.collected(path)
    for name in _FACTS:
      if facts.setdefault(name, record.get(name)) != record.get(name):
        raise ValueError(
          f"{path}: {name} is {record.get(name)}, others have {facts[name]}; "
          "collect them again with one version"
        )
  return {name: value for name, value in facts.items() if value is not None}


def family(path: Path) -> str:
  """The family of a program: its file, or for a drawn program its name without the seed."""
  file, program = label_file.collected(path)["source"].split(":")
  stem = Path(file).stem
  return program.rpartition("_")[0] if stem.startswith("generated_") else stem


def judged(ranker: Ranker, graphs: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
  """Mean figures of the model and of the baselines of `own_quality`, by split."""
  return {
    split: own_quality.blind_rows(members)
    | own_quality.heuristic_rows(members)
    | {"this model": own_quality.means(own_quality.rows_of(ranker, members))}
    for split, members in graphs.items()
  }


def card(name: str, about: Mapping[str, Any]) -> str:
  """The card of a model, in Markdown."""
  data, programs, families = about["labels"], about["programs"], about["families"]
  lines = [
    f"# {name}",
    "",
    f"This model (`{about['model']}`, {about['bytes'] / 1e3:.0f} kB) orders layouts of a program.",
    "",
    f"- **Label**: {data['config_runtime']}.",
    "- **Versions**: "
    + ", ".join(
      f"{key} {value}" for key, value in data.items() if key not in ("config_runtime", "label")
    )
    + ".",
    f"- **Data**: `{about['collection']}`, features and labels of example programs of the project. "
    "They contain no code of the compiler.",
    *(
      f"- **{split}**: {len(programs[split])} programs of the families "
      f"{', '.join(families[split])}."
      for split in _SPLITS
    ),
    "",
  ]
  for split, rows in about["figures"].items():
    lines += [f"On the {split} families:", "", own_quality.table(rows), ""]
  lines += [
    "The figures of the valid families chose the checkpoint. The figures of the test families "
    "chose nothing. All figures are means over programs. `kendaltau` is tau-b. `ordered` is the "
    "share of pairs ordered rightly minus the share of all other pairs, among pairs with different "
    "labels. `slowdown1` and `slowdown5` are the slowdowns of the best of the first 1 and 5 "
    "configurations. `tuned5` is the slowdown of the best of 5 labels in the order of the model, "
    "one of every set of changed groups first. `found8` is the share of programs in which 8 labels "
    "in this order find a choice that is better than the compiler's own choice. It counts only "
    "programs that have a choice more than 2 % better.",
    "",
    *_of_times(about),
    "The model has learnt the order of the labels. If the label is an estimate, the model has "
    "learnt no times of a real machine. On other kinds of programs its order is less reliable.",
    "",
  ]
  return "\n".join(lines)


def _of_times(about: Mapping[str, Any]) -> list[str]:
  """Lines of the card of a model that predicts times; none of any other."""
  if not (errors := about.get("errors")):
    return []
  return [
    f"Scores are predicted times in microseconds. On the test families half of the programs are "
    f"off by at most {errors['program']:.0%}, half of their kernels by at most "
    f"{errors['kernel']:.0%} of the label.",
    "",
  ]


def ship(
  run: Path, data_root: Path, name: str, folder: Path, seeds: Mapping[str, Any] | None = None
) -> str:
  """Writes `NAME.npz` and `NAME.md` and returns the card.

  Args:
    run: working folder that the ranker was trained in.
    data_root: data root of its collection.
    name: name of the model.
    folder: folder to write to.
    seeds: results of `own_quality`, for the mean over seeds beside the one seed that ships.

  Raises:
    ValueError: the model file is larger than 1 MiB.
  """
  ranker = Ranker.load(run)
  place = data_root.joinpath(*ranker.collection.name.split(":"))
  files = {split: sorted((place / split).glob("*.npz")) for split in _SPLITS}
  graphs = {split: [npz.read_layout(path) for path in files[split]] for split in _SPLITS}
  about = {
    "name": name,
    "model": ranker.config.model.name,
    "collection": ranker.collection.name,
    "labels": facts(sum(files.values(), [])),
    "families": {split: sorted(set(map(family, paths))) for split, paths in files.items()},
    "programs": {split: [path.stem for path in paths] for split, paths in files.items()},
    "figures": _rounded(judged(ranker, {split: graphs[split] for split in _SPLITS[1:]})),
  }
  if ranker.family.network.predicts_kernels:
    about["errors"] = _rounded(own_times.errors(ranker, graphs["test"]))
  for split, rows in about["figures"].items():
    row = (seeds or {}).get(split, {}).get(_NAMES.get(run.parent.name))
    if row:
      rows[f"mean of {row['seeds']} seeds"] = _rounded(
        {key: row[key] for key in (*own_quality.COLUMNS, "spread") if key in row}
      )
  folder.mkdir(exist_ok=True)
  path = folder / f"{name}.npz"
  ranker.save(path, ranker.params, about)
  about["bytes"] = path.stat().st_size
  if about["bytes"] > _MOST_BYTES:
    path.unlink()
    raise ValueError(f"{name} takes {about['bytes']:,} bytes, expected at most {_MOST_BYTES:,}")
  text = card(name, about)
  path.with_suffix(".md").write_text(text)
  return text


def _rounded(tree: Any) -> Any:
  if isinstance(tree, Mapping):
    return {key: _rounded(value) for key, value in tree.items()}
  return tree if np.isnan(tree) else round(tree, 4)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--run", type=Path, required=True, help="working folder of the ranker")
  parser.add_argument("--data_root", type=Path, default=Path("data/own/npz"))
  parser.add_argument("--name", default="layout-v3-estimate")
  parser.add_argument("--seeds", type=Path, help="file that own_quality.py wrote to --out")
  args = parser.parse_args()
  seeds = json.loads(args.seeds.read_text()) if args.seeds else None
  print(ship(args.run, args.data_root, args.name, model_file.SHIPPED, seeds))
  print(model_file.MODEL_FILE, "->", model_file.SHIPPED / f"{args.name}.npz")


if __name__ == "__main__":
  main()
