"""The names after the colon of a config: at most one collection, one ranker, and `ci`.

A ranker is a function from the name of a collection to a `Config`; the first line of its docstring
describes it. A file of `configs/systems` lists its rankers in `LAYOUTS` and `TILES`, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import difflib
import functools
import inspect
import itertools
import runpy
from typing import Any

from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.run.configs import folder

Ranker = Callable[[str], Config]

_CI = "ci"
OWN = "own-"  # prefix of the names of own collections
_ONE_RANKER = (
  "a config has one collection and one ranker; --config.FIELD changes a field "
  "(--config.model.name=NAME the network)"
)
# Options of networks in runs of a few seconds, where a network has them.
_SMALL: dict[str, Any] = {
  **dict.fromkeys("width hidden_dim token_width".split(), 16),
  **dict.fromkeys("op_embed_dim first_width feature_width map_width position_width".split(), 8),
  **dict.fromkeys("keys messages".split(), 8),
  **dict.fromkeys("widths mlp_widths edge_widths config_widths head_widths".split(), (8,)),
  **dict.fromkeys("num_gnns num_layers layers token_layers filter_layers".split(), 1),
  **dict.fromkeys("blocks attention_blocks cross_blocks".split(), 1),
  "rounds": 2,
}


@functools.cache
def systems(kind: str) -> dict[str, Ranker]:
  """The rankers of the files of `configs/systems`, by name, for `layout` or `tile`."""
  files = [runpy.run_path(str(path)) for path in sorted(folder().glob("systems/[!_]*.py"))]
  listed = [item for file in files for item in file.get(f"{kind.upper()}S", {}).items()]
  return dict(sorted(listed, key=lambda item: item[0].startswith("preset=")))  # these come last


def small(config: Config) -> Config:
  """The variant `ci` of a config: a run of a few seconds, few and narrow layers, few slates."""
  sizes = {f"model.{k}": v for k, v in _SMALL.items() if k in config.model.options}
  configs = 8
  if config.kind == "tile":
    batch = dict(graphs=10, slates_per_epoch=40, min_configs=2)
    train = dict(epochs=5, valid_sampling="fixed", valid_configs=256, log_every_steps=4)
  else:
    batch = dict(graphs=4, slates_per_epoch=16, min_configs=4, keep_nodes=100)
    train = dict(epochs=2, valid_configs=50, log_every_steps=4)
  return config.replace(
    **sizes,
    **{f"batch.{name}": value for name, value in batch.items()},
    **{f"train.{name}": value for name, value in train.items()},
    **({"segments.max_nodes": 60} if config.segments else {}),
    batch__configs=configs,
    batch__config_chunk=min(config.batch.config_chunk, configs),
    optimizer__accumulation_steps=1,
    train__quick_compile=True,
    eval__configs=min(config.eval.configs, 64),
  )


def parse(
  text: str, *, file: str, collections: Sequence[str], rankers: Mapping[str, Ranker]
) -> tuple[str, str, bool]:
  """Parses a variant into the collection, the ranker, and whether it has `ci`.

  An absent collection or ranker is an empty string.

  Args:
    text: names, separated by commas, in any order.
    file: name of the config file, for errors.
    collections: allowed collections, in addition to `own-NAME`.
    rankers: allowed rankers, by name.

  Raises:
    ValueError: a name is unknown, or there are two collections or rankers.
  """
  names = [name for name in text.split(",") if name]
  kinds = (
    [name for name in names if name in collections or name.startswith(OWN)],
    [name for name in names if name in rankers],
  )
  allowed = [*collections, *rankers, _CI]
  for name in names:
    if name not in (*itertools.chain(*kinds), _CI):
      raise ValueError(
        f"configs/{file} has no variant {name!r}; {_hint(name, file, allowed)}it "
        f"has {', '.join(filter(None, allowed))}"
      )
  for kind in kinds:
    if len(kind) > 1:
      raise ValueError(f"{file} takes one of {' and '.join(kind)}: {_ONE_RANKER}")
  collection, ranker = (kind[0] if kind else "" for kind in kinds)
  return collection, ranker, _CI in names


def _hint(name: str, file: str, allowed: Sequence[str]) -> str:
  """Start of a sentence with the config file that has a name, or with the nearest allowed name."""
  for kind in ("tile", "layout"):
    if f"{kind}.py" != file and name in runpy.run_path(str(folder() / f"{kind}.py"))["VARIANTS"]:
      return f"it is a variant of configs/{kind}.py, of the command run_{kind}; configs/{file}: "
  near = difflib.get_close_matches(name, allowed, n=1)
  return f"did you mean {near[0]}? " if near else ""


def described(collections: Mapping[str, str], rankers: Mapping[str, Ranker]) -> dict[str, str]:
  """Descriptions of all names after the colon, by name."""
  user = {f"{OWN}NAME": "a collection of your own"}
  named = {name: _description(ranker) for name, ranker in rankers.items() if name}
  return {**collections, **user, **named, _CI: "a few seconds on a CPU"}


def _description(ranker: Ranker) -> str:
  function = ranker.func if isinstance(ranker, functools.partial) else ranker
  return (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")
