"""Compares the TPU compiler's estimates with measured run times of AlexNet and UNet3D.

    pip install ".[tpu]"
    JAX_PLATFORMS=cpu python benchmarks/bridge.py --data DIR --out benchmarks/bridge.json
    JAX_PLATFORMS=cpu python benchmarks/bridge.py --data DIR --out benchmarks/bridge_unet3d.json \
        --program unet3d --alone

`DIR` holds the released layout data, such as `DIR/layout/xla/default/train/alexnet.npz`; its
default is $TPUGRAPHS_DATA. Run times of configurations with equal output orders agree within
0.1 %. Each of the commonest combinations of output orders is applied to the training step in
`examples/programs/` and compiled once for TPU v3, which takes from half a minute to some minutes.
Only the run times are measured; all other numbers are estimates of the compiler. Finished
compilations are kept in `--out`, so that a killed run can be continued. `--alone` is for programs
that take too long to compile as a whole: it compiles each operation whose order differs between
configurations as a program of its own, in each of its orders.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
import itertools
import json
import os
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np
import pages
from scipy import stats
import timing

from tpugraphs_jax.columns import opcode_ids
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import jaxprs, proto, tpu, tpu_kernels
from tpugraphs_jax.tuning import choosing, labels, programs

EXAMPLES = Path(__file__).parents[1] / "examples" / "programs"
SPLITS = {"alexnet": "train", "unet3d": "valid"}  # of the released files
_NOISE = 1e-3  # relative difference of run times with equal output orders
_RIGHT = 2.0  # an estimated cost within this factor of the measured one is right
_OUTPUT = 6  # of a node's 18 integers
_DIMENSIONS = slice(21, 27)  # of a node's features: sizes of the output
_OPCODES = {"conv_general_dilated": "convolution", "dot_general": "dot", "reshape": "reshape"}
_ESTIMATES = {
  "optimal seconds": lambda row: row["optimal_seconds"],
  "cycles of all kernels": lambda row: row["estimated_cycles"],
  "cycles of the slowest kernel": lambda row: max(map(max, row["cycles"].values())),
  "bytes accessed": lambda row: row["bytes_accessed"],
  "optimal seconds x cycles": lambda row: row["optimal_seconds"] * row["estimated_cycles"],
}
Key = tuple[str, tuple[int, ...]]  # opcode and shape of the output


def keys(graph: Any) -> list[Key]:
  """Opcode and output shape of every configurable node."""
  names = {number: name for name, number in opcode_ids().items()}
  return [
    (
      names[int(graph.node_opcode[node])],
      tuple(int(size) for size in graph.node_feat[node, _DIMENSIONS] if size > 0),
    )
    for node in graph.config_node
  ]


def combinations(graph: Any, choices: choosing.Choices) -> tuple[np.ndarray, np.ndarray]:
  """Distinct combinations of output orders, and the combination of each configuration.

  Returns:
    Option numbers `[combinations, groups]`, the commonest combination first, and the index of
    each configuration's combination `[C]`.

  Raises:
    ValueError: nodes that belong to one equation have different orders.
  """
  rows = graph.configs.decode(np.arange(len(graph.configs)))[:, :, :_OUTPUT]
  numbers = np.zeros((len(rows), len(choices.groups)), np.int64)
  by_key: dict[Key, list[int]] = {}
  for place, key in enumerate(keys(graph)):
    by_key.setdefault(key, []).append(place)
  for place, group in enumerate(choices.groups):
    nodes = by_key.get((_OPCODES[group.primitive], group.shapes[0]))
    if nodes is None:
      continue
    orders = rows[:, nodes]
    if (orders != orders[:, :1]).any():
      raise ValueError(f"nodes of {group} differ in their output orders, expected one order")
    for option, (output, *_) in enumerate(group.options):
      order = (*output, *(-1,) * (_OUTPUT - len(output)))
      numbers[(orders[:, 0] == order).all(axis=1), place] = option
  distinct, which, count = np.unique(numbers, axis=0, return_inverse=True, return_counts=True)
  order = np.argsort(-count, kind="stable")
  return distinct[order], np.argsort(order)[which.ravel()]


def estimate(function: Any, args: tuple) -> dict[str, Any]:
  """The compiler's estimates for a function on TPU v3, by name."""
  program = tpu.compile_function(function, args, "tpu:v3")
  cycles = tpu_kernels.estimated_cycles(proto.parse_module(program.module, where="TPU program"))
  return {
    "optimal_seconds": program.optimal_seconds,
    "bytes_accessed": program.bytes_accessed,
    "estimated_cycles": cycles.cycles,
    "cycles": labels.cycles_by_group(cycles.by_kernel),
  }


def equations(jaxpr: Any) -> Iterator[Any]:
  """The equations of a jaxpr and of the jaxprs in their parameters."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs.programs_of(equation):
      yield from equations(inner)


def alone(program: Any, group: choosing.Group, options: Sequence[int]) -> dict[str, Any]:
  """Estimates of one equation of a group, compiled as a program of its own, by order."""
  jaxpr = jax.make_jaxpr(program.function)(*program.args).jaxpr
  equation = next(
    candidate for candidate in equations(jaxpr) if choosing.group_of(candidate) == group
  )
  function = lambda *inputs: equation.primitive.bind(*inputs, **equation.params)
  args = [
    jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in equation.invars
  ]
  single = choosing.choices(function, *args)
  return {
    str(list(group.options[option][0])): estimate(
      choosing.apply(function, single.choice([option])), args
    )
    for option in options
  }


def effects(
  distinct: np.ndarray, runtime_ms: np.ndarray, place: int
) -> tuple[dict[int, float], int]:
  """Measured times of two combinations that differ in one group and in the fewest other groups.

  Args:
    found: option numbers `[combinations, groups]`.
    runtime_ms: median run time of each combination `[combinations]`.
    place: index of the group.

  Returns:
    Milliseconds of the whole step by option of the group, and the number of other groups in
    which the two combinations differ.
  """
  pairs = [
    (int((distinct[a] != distinct[b]).sum()) - 1, a, b)
    for a, b in itertools.combinations(range(len(distinct)), 2)
    if distinct[a, place] != distinct[b, place]
  ]
  others, *pair = min(pairs)
  return {int(distinct[index, place]): float(runtime_ms[index]) for index in pair}, others


def run_alone(args: argparse.Namespace, graph: Any, program: Any) -> str:
  """Compiles each operation whose order differs between configurations; returns a table."""
  choices = choosing.choices(program.function, *program.args)
  distinct, which = combinations(graph, choices)
  runtime_ms = [
    float(np.median(graph.configs.labels[which == place])) / 1e6 for place in range(len(distinct))
  ]
  rows = json.loads(args.out.read_text())["operations"] if args.out.exists() else {}
  differing = [place for place in range(len(choices.groups)) if len(set(distinct[:, place])) > 1]
  for number, place in enumerate(differing):
    group = choices.groups[place]
    if str(group) not in rows:
      measured, others = effects(distinct, np.array(runtime_ms), place)
      orders = alone(program, group, list(measured))
      rows[str(group)] = {
        "others": others,
        "orders": [
          {"order": order, "median_ms": round(time, 3), **raw}
          for time, (order, raw) in zip(measured.values(), orders.items())
        ],
      }
    record = {
      "program": args.program,
      "target": "tpu:v3",
      "libtpu": tpu.libtpu_version(),
      "configs": len(which),
      "combinations": len(distinct),
      "operations": rows,
    }
    timing.write(record, args.out)
    print(f"{number + 1} of {len(differing)} operations", flush=True)
  return alone_table(record)


def alone_table(record: Mapping[str, Any]) -> str:
  """A row for each operation as a Markdown table: first the faster order, then the slower one."""
  rows = []
  for name, row in record["operations"].items():
    pair = sorted(row["orders"], key=lambda order: order["median_ms"])
    rows.append(
      [
        _short([name]),
        ", ".join(order["order"] for order in pair),
        ", ".join(f"{order['median_ms']:.2f}" for order in pair),
        str(row["others"]),
        ", ".join(f"{1e3 * order['optimal_seconds']:.3f}" for order in pair),
        ", ".join(f"{order['estimated_cycles'] / 1e6:.1f}" for order in pair),
      ]
    )
  return pages.table(
    [
      "output of",
      "orders, minor to major",
      "measured, ms, whole step",
      "other operations that change",
      "optimal, ms",
      "M cycles",
    ],
    rows,
  )


def taus(rows: list[Mapping[str, Any]], times: list[np.ndarray]) -> dict[str, float]:
  """Kendall's tau-b between each estimate and the run times of all configurations."""
  runtime = np.concatenate(times)
  return {
    name: round(
      float(
        stats.kendalltau(
          np.concatenate([np.full(len(sample), value(row)) for row, sample in zip(rows, times)]),
          runtime,
        ).statistic
      ),
      4,
    )
    for name, value in _ESTIMATES.items()
  }


def _short(equations: list[str]) -> str:
  """Equations by operation: the first one's output shape, and how many more there are."""
  shapes: dict[str, list[str]] = {}
  for equation in equations:
    name, shape = re.match(r"(\w+) \w+(\[[\d,]*\])", equation).groups()
    shapes.setdefault(_OPCODES[name], []).append(shape)
  return (
    ", ".join(
      f"{name} {first}" + (f" and {len(others)} more" if others else "")
      for name, (first, *others) in shapes.items()
    )
    or "nothing"
  )


def verdict(first: Mapping[str, Any], row: Mapping[str, Any]) -> str:
  """How the compiler's optimal seconds rate a change, judged by its measured cost."""
  measured = row["median_ms"] - first["median_ms"]
  charged = 1e3 * (row["optimal_seconds"] - first["optimal_seconds"])
  noise = _NOISE * first["median_ms"]
  if max(abs(measured), abs(charged)) <= noise:
    return "right: nothing"
  if charged == 0:
    return "blind"
  if measured <= noise:
    return "charges for nothing"
  factor = measured / charged
  if factor < 0 or 1 / _RIGHT <= factor <= _RIGHT:
    return "the wrong way" if factor < 0 else "right"
  return f"underrates {factor:,.0f} x" if factor > 1 else f"overrates {1 / factor:,.0f} x"


def table(record: Mapping[str, Any]) -> str:
  """The combinations as a Markdown table."""
  first, rows = record["combinations"][0], []
  for row in record["combinations"]:
    changed = [name for name, order in row["orders"].items() if order != first["orders"][name]]
    rows.append(
      [
        _short(changed),
        f"{row['configs']:,}",
        f"{row['median_ms']:.2f}",
        f"{1e3 * row['optimal_seconds']:.3f}",
        f"{row['estimated_cycles'] / 1e6:.2f}",
        f"{row['bytes_accessed'] / 1e9:.3f}",
        verdict(first, row) if changed else "-",
      ]
    )
  return pages.table(
    [
      "changed against the commonest",
      "configurations",
      "measured, ms",
      "optimal, ms",
      "M cycles",
      "GB",
      "optimal seconds of the change",
    ],
    rows,
  )


def tau_table(record: Mapping[str, Any]) -> str:
  """Kendall's tau-b of the estimates as a Markdown table."""
  return pages.table(
    ["estimate", "tau-b"], [[name, f"{tau:.3f}"] for name, tau in record["tau_b"].items()]
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--data",
    default=os.environ.get("TPUGRAPHS_DATA"),
    help="folder of the released data (default: $TPUGRAPHS_DATA)",
  )
  parser.add_argument("--out", required=True, type=Path, help="file of results")
  parser.add_argument("--program", choices=SPLITS, default="alexnet", help="default: alexnet")
  parser.add_argument("--combinations", type=int, default=14, help="how many are compiled")
  parser.add_argument(
    "--alone", action="store_true", help="single operations instead of the whole program"
  )
  args = parser.parse_args()
  if args.data is None:
    parser.error("--data is missing, expected the folder of the released data")
  graph = npz.read_layout(
    Path(args.data, "layout/xla/default", SPLITS[args.program], f"{args.program}.npz")
  )
  (program,) = programs.load(f"{EXAMPLES / args.program}.py:step")
  if args.alone:
    print(run_alone(args, graph, program))
    return
  choices = choosing.choices(program.function, *program.args)
  distinct, which = combinations(graph, choices)
  done = json.loads(args.out.read_text())["combinations"] if args.out.exists() else []
  known = {tuple(row["numbers"]): row for row in done}
  rows, times = [], []
  for place, numbers in enumerate(distinct[: args.combinations].tolist()):
    runtime = graph.configs.labels[which == place]
    chosen = {
      str(group): list(group.options[number][0])
      for group, number in zip(choices.groups, numbers)
      if number
    }
    raw = known.get(tuple(numbers)) or estimate(
      choosing.apply(program.function, choices.choice(numbers)), program.args
    )
    rows.append(
      {
        **raw,
        "numbers": numbers,
        "orders": chosen,
        "configs": len(runtime),
        "median_ms": round(float(np.median(runtime)) / 1e6, 3),
      }
    )
    times.append(runtime)
    record = {
      "program": args.program,
      "target": "tpu:v3",
      "libtpu": tpu.libtpu_version(),
      "distinct": len(distinct),
      "configs": len(which),
      "combinations": rows,
      "tau_b": taus(rows, times) if len(rows) > 1 else {},
    }
    timing.write(record, args.out)
    print(f"{place + 1} of {min(args.combinations, len(distinct))} combinations", flush=True)
  print(f"{table(record)}\n\n{tau_table(record)}")


if __name__ == "__main__":
  main()
