"""Programs that others measured on TPUs, read from a folder: JAXBench, products, tokamax' kernels.

The folder has any of

    jaxbench/times.csv, jaxbench/WORKLOAD/baseline.py and optimized.py
    gemm.csv                   products of `tpu-perf-model`: wall clock with a launch in it
    tokamax/DEVICE/*.json      tokamax' autotuning caches: times by arguments and configuration
    sjtu/medians_v6e.csv       a corpus of kernels: medians of one v6e, see `measured_corpus`

None of it is part of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import csv
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
from pathlib import Path
import pkgutil
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compiled, measured_corpus, tokamax_ops
from benchmarks.tokamax_history import Entry, History
from tpugraphs_jax.hlo import proto
from tpugraphs_jax.infra import trust

JAXBENCH, PRODUCTS, TOKAMAX, CORPUS = "jaxbench", "products", "tokamax", "corpus"
_JAXBENCH_TARGET = _CORPUS_TARGET = "tpu:v6e"
# Flags of libtpu with which the corpus was measured. They add instructions to Pallas kernels.
_CORPUS_FLAGS = (
  "--xla_enable_custom_call_region_trace=true --xla_xprof_register_llo_debug_info=true"
)
_LAUNCH = {"v5e": 105.6e-6, "v6e": 118.7e-6}  # seconds of each measured product, by generation
_SHORTEST = 50e-6  # seconds without the launch
_TYPES = {"bf16": (jnp.bfloat16, jnp.float32), "int8": (jnp.int8, jnp.int32)}
_PALLAS, _CHUNKED = "pallas_", "chunked"
# Operations that tokamax computes in several ways, between which people choose.
_CHOICES = ("attention", "cross_entropy", "ragged_dot")
_TUNED = ("pallas_mosaic_tpu_flash_attention", "pallas_mosaic_tpu_ragged_dot")
_CANDIDATES = 24  # drawn block sizes of a kernel; of some, the compiler refuses the vector memory
_NO_CHOICE = ("return_residuals", "normalize_output")  # arguments that may differ between the ways
_KINDS = {
  "tpu:v5e": "TPU v5 lite",
  "tpu:v5p": "TPU v5",
  "tpu:v6e": "TPU v6 lite",
  "tpu:7x": "TPU7x",
}


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that was measured.

  Attributes:
    source: `jaxbench`, `products` or `tokamax`.
    group: what is compared with it: a workload, a type, an operation.
    name: of its file.
    target: the TPU on which it was measured.
    milliseconds: median of its measured times; NaN of a candidate of block sizes.
    key: arguments of an operation, as JSON, or the workload.
    variant: `baseline`, `optimized`, or a configuration as JSON.
    compile: compiles it.
    base: of a candidate: the name of the program with the measured configuration.
    is_exact: whether all arguments are known that its time depends on: some caches name the number
      of the groups of a ragged product and not their sizes, which the version of tokamax tells.
    commit: of the version of tokamax that is compiled; empty: of the installed one.
    day: of that version, such as `2026-02-28`; empty: not known.
    flags: of libtpu, with which it was measured.
  """

  source: str
  group: str
  name: str
  target: str
  milliseconds: float
  key: str
  variant: str
  compile: Callable[[], compiled.Compiled] = dataclasses.field(repr=False, compare=False)
  base: str = ""
  is_exact: bool = True
  commit: str = ""
  day: str = ""
  flags: str = ""


def read(folder: Path, history: History | None = None) -> list[Program]:
  """All programs of a folder, by name.

  Args:
    folder: of measured programs.
    history: of tokamax: its kernels are compiled as they were when they were measured.
  """
  found = [*_jaxbench(folder / "jaxbench"), *_products(folder / "gemm.csv")]
  found += _tokamax(folder / "tokamax", history)
  return [*found, *_corpus(folder / "sjtu" / "medians_v6e.csv")]


def sample(programs: Sequence[Program], count: int, seed: int) -> list[Program]:
  """At most `count` programs of each target and group of products and tokamax, all others."""
  groups: dict[tuple[str, ...], list[Program]] = {}
  for program in programs:
    if program.source == TOKAMAX and is_plain(program.group):
      continue
    group = "" if program.source == PRODUCTS else program.group
    groups.setdefault((program.source, program.target, group), []).append(program)
  kept = []
  for (source, *_), members in sorted(groups.items()):
    members = sorted(members, key=lambda each: each.name)
    order = np.random.default_rng(seed).permutation(len(members))
    is_small = source in (JAXBENCH, CORPUS)
    kept += [members[place] for place in (order if is_small else order[:count])]
  return kept


def is_plain(operation: str) -> bool:
  """Whether an operation of tokamax is computed by plain XLA."""
  return not operation.startswith(_PALLAS) and _CHUNKED not in operation


def is_pallas(operation: str) -> bool:
  """Whether an operation of tokamax is a Pallas kernel, which every compiler takes as it is."""
  return operation.startswith(_PALLAS)


def choices(programs: Sequence[Program]) -> list[list[Program]]:
  """Programs that compute the same in different ways on the same TPU, more than one each.

  Of JAXBench these are the plain and the Pallas variant of a workload. Of tokamax these are
  operations and configurations with the same arguments.
  """
  groups: dict[tuple[str, str, str], list[Program]] = {}
  for program in programs:
    key = program.key
    if program.source in (PRODUCTS, CORPUS):
      continue
    if program.source == TOKAMAX:
      arguments = {name: each for name, each in json.loads(key).items() if name not in _NO_CHOICE}
      key = json.dumps(arguments, sort_keys=True)
    groups.setdefault((program.source, program.target, key), []).append(program)
  return [group for _, group in sorted(groups.items()) if len(group) > 1]


def sample_choices(programs: Sequence[Program], count: int, seed: int) -> list[Program]:
  """The programs of at most `count` choices of each TPU and operation."""
  kept: list[Program] = []
  taken: dict[tuple[str, str], int] = {}
  groups = choices([each for each in programs if each.source == TOKAMAX])
  for place in np.random.default_rng(seed).permutation(len(groups)).tolist():
    group = groups[place]
    kind = next(name for name in _CHOICES if name in group[0].group)
    if taken.get((group[0].target, kind), 0) < count:
      taken[group[0].target, kind] = taken.get((group[0].target, kind), 0) + 1
      kept += group
  return kept


def shortest(programs: Sequence[Program], keys: int) -> list[Program]:
  """Measured Pallas kernels whose block sizes tokamax tunes, with the best ones of each key.

  Args:
    programs: all measured ones.
    keys: how many kernels of each TPU and operation: the fastest ones, whose
      candidates compile quickly.
  """
  groups: dict[tuple[str, str], dict[str, Program]] = {}
  for program in programs:
    if program.group in _TUNED and program.variant != "{}":
      best = groups.setdefault((program.target, program.group), {})
      if program.key not in best or program.milliseconds < best[program.key].milliseconds:
        best[program.key] = program
  return [
    program
    for _, members in sorted(groups.items())
    for program in sorted(members.values(), key=lambda each: each.milliseconds)[:keys]
  ]


def candidates(program: Program, seed: int) -> list[Program]:
  """The configuration of a program and others that tokamax' autotuner tries, drawn with a seed.

  The installed version of tokamax makes them all.
  """
  import pydantic

  _as_device(program.target)
  kernel = _kernels()[program.group]()
  values = tokamax_ops.arguments(program.group, kernel._fwd_signature, program.key)
  texts = pydantic.TypeAdapter(kernel.config_cls)
  tried = kernel._get_autotuning_configs(kernel.bind(**values))
  variants = sorted({texts.dump_json(each).decode() for each in tried} - {program.variant})
  order = np.random.default_rng(seed).permutation(len(variants))[:_CANDIDATES]
  return [
    dataclasses.replace(
      program,
      name=f"{program.name}/{_checksum(variant)}",
      milliseconds=math.nan,
      variant=variant,
      compile=functools.partial(
        compile_kernel, program.group, program.key, variant, program.target
      ),
      base=program.name,
      commit="",
      day="",
    )
    for variant in (program.variant, *(variants[place] for place in order))
  ]


def _jaxbench(folder: Path) -> Iterator[Program]:
  times = folder / "times.csv"
  if not times.exists():
    return
  with open(times, newline="") as file:
    for row in csv.DictReader(file):
      workload, variant = row["workload"], row["variant"]
      path = folder / workload / f"{variant}.py"
      if path.exists():
        yield Program(
          JAXBENCH,
          variant,
          f"jaxbench/{workload}.{variant}",
          _JAXBENCH_TARGET,
          float(row["median_ms"]),
          workload,
          variant,
          functools.partial(_compile_workload, path),
        )


def _compile_workload(path: Path) -> compiled.Compiled:
  """Compiles a workload of JAXBench, its inputs in bfloat16 where it lets one choose.

  Integers have their values: kernels of ragged groups read the sizes.
  """
  _as_device(_JAXBENCH_TARGET)
  spec = importlib.util.spec_from_file_location("workload", path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules["workload"] = module
  spec.loader.exec_module(module)
  has_type = "dtype" in inspect.signature(module.create_inputs).parameters
  static: dict[int, Any] = {}

  def inputs() -> list[Any]:
    made = module.create_inputs(**({"dtype": jnp.bfloat16} if has_type else {}))
    made = made if isinstance(made, (list, tuple)) else (made,)
    static.update({at: each for at, each in enumerate(made) if isinstance(each, (int, float))})
    return [each for at, each in enumerate(made) if at not in static]

  shapes = jax.eval_shape(inputs)
  is_integer = lambda array: jnp.issubdtype(array.dtype, jnp.integer)
  # The compiler leaves out the arrays that nothing reads.
  integers = jax.jit(lambda: [array if is_integer(array) else None for array in inputs()])()
  arguments = [shape if known is None else known for shape, known in zip(shapes, integers)]

  def workload(*arrays: jax.Array) -> Any:
    left = iter(arrays)
    count = len(arrays) + len(static)
    return module.workload(*(static[at] if at in static else next(left) for at in range(count)))

  return compiled.compile_function(workload, arguments, _JAXBENCH_TARGET)


def _products(path: Path) -> Iterator[Program]:
  if not path.exists():
    return
  with open(path, newline="") as file:
    for row in csv.DictReader(file):
      sizes = tuple(int(row[name]) for name in "MNK")
      seconds = float(row["median_s"]) - _LAUNCH[row["sku"]]
      if seconds >= _SHORTEST:
        target = f"tpu:{row['sku']}"
        name = f"products/{row['sku']}_{row['dtype']}_{'x'.join(map(str, sizes))}"
        build = functools.partial(_compile_product, sizes, row["dtype"], target)
        yield Program(PRODUCTS, row["dtype"], name, target, 1e3 * seconds, name, "", build)


def _compile_product(sizes: tuple[int, ...], dtype: str, target: str) -> compiled.Compiled:
  (rows, columns, inner), (given, result) = sizes, _TYPES[dtype]
  product = lambda a, b: jnp.matmul(a, b, preferred_element_type=result)
  shapes = [jax.ShapeDtypeStruct(shape, given) for shape in ((rows, inner), (inner, columns))]
  return compiled.compile_function(product, shapes, target)


def _corpus(path: Path) -> Iterator[Program]:
  """The rows of the corpus that jax alone builds."""
  if not path.exists():
    return
  lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
  for row in csv.DictReader(lines):
    entry = measured_corpus.find(row["family"], row["program"], row["shape"])
    if entry is None:
      continue
    kind, make = entry
    name = re.sub(r"[^\w.-]+", "_", f"{row['program']}_{row['shape']}")
    yield Program(
      CORPUS,
      kind,
      f"corpus/{row['family']}/{name}",
      _CORPUS_TARGET,
      float(row["median_ms"]),
      row["shape"],
      f"{row['family']}, {row['program']}",
      functools.partial(_compile_corpus, make),
      flags=_CORPUS_FLAGS,
    )


def _compile_corpus(make: Callable[[], tuple[Callable, tuple]]) -> compiled.Compiled:
  _as_device(_CORPUS_TARGET)
  return compiled.compile_function(*make(), _CORPUS_TARGET)


def _tokamax(folder: Path, history: History | None) -> Iterator[Program]:
  for path in sorted(folder.glob("*/*.json")):
    device, operation = path.parent.name, path.stem
    target = tokamax_ops.DEVICES.get(device)
    if target is None or not any(name in operation for name in _CHOICES):
      continue
    for key, row in trust.parse(path.read_text() or "{}").items():
      for variant, measured in row.items():
        times = measured["evaluation_times_ms"]
        entry = history and history.entry(device, operation, key, variant, times)
        was = entry or Entry("", "", key, variant)
        is_known = bool(was.commit) or not isinstance(json.loads(key).get("group_sizes"), dict)
        yield Program(
          TOKAMAX,
          operation,
          f"tokamax/{device}/{operation}/{_checksum(f'{key}{variant}')}",
          target,
          float(np.median(times)),
          key,
          variant,
          functools.partial(compile_kernel, operation, was.key, was.variant, target),
          is_exact=is_known,
          commit=was.commit,
          day=was.day,
        )


def _checksum(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def compile_kernel(operation: str, key: str, variant: str, target: str) -> compiled.Compiled:
  """Compiles a kernel of tokamax with a configuration."""
  import pydantic
  from tokamax._src import benchmarking

  _as_device(target)
  kernels = tokamax_ops.operations() | _kernels()
  if operation not in kernels:
    raise ValueError(f"tokamax {tokamax_ops.version()} has no operation {operation}")
  made, arguments = kernels[operation](), json.loads(key)
  values = tokamax_ops.arguments(operation, made._fwd_signature, key)
  if variant != "{}":
    config = pydantic.TypeAdapter(made.config_cls).validate_json(variant)
    made = dataclasses.replace(made, config=config)
  type(made).supported_on = lambda self, device: True
  forward, arrays = benchmarking.standardize_function(made, kwargs=values, seed=None)
  found = compiled.compile_function(forward, (arrays,), target)
  return dataclasses.replace(found, operands=_operands(operation, found, arguments, variant))


@functools.cache
def _kernels() -> dict[str, type]:
  """Tokamax' operations for TPUs by the name of their caches."""
  from tokamax._src import ops
  from tokamax._src.ops import op

  found = {}
  for package in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
    if not package.ispkg:
      continue
    folder = importlib.import_module(package.name)
    for each in pkgutil.iter_modules(folder.__path__, f"{package.name}."):
      name = each.name.rpartition(".")[2]
      if name.endswith("_test") or not (name.startswith("pallas_mosaic_tpu") or _CHUNKED in name):
        continue
      module = importlib.import_module(each.name)
      for title, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, op.Op) and value.__module__ == each.name:
          found[re.sub(r"(?!^)([A-Z])", r"_\1", title).lower()] = value
  return found


def _operands(
  operation: str, found: compiled.Compiled, arguments: Mapping[str, Any], variant: str
) -> dict[str, dict[int, list[int]]]:
  """The scalar prefetch of a ragged product, which the program computes from its group sizes."""
  if "ragged_dot" not in operation or not operation.startswith(_PALLAS):
    return {}
  from tokamax._src.ops.ragged_dot import base, pallas_mosaic_tpu_kernel

  sizes = arguments["group_sizes"]
  if isinstance(sizes, dict):
    sizes = base.generate_group_sizes(m=sizes["total_size"], num_groups=sizes["num_groups"])
  rows = int(re.match(r"\w+\[(\d+)", arguments["lhs"])[1])
  contracted = arguments["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0][0]
  metadata, count = pallas_mosaic_tpu_kernel.make_group_metadata(
    group_sizes=jnp.array(sizes, jnp.int32),
    m=rows,
    tm=json.loads(variant)["tile_m"],
    start_group=jnp.int32(0),
    num_nonzero_groups=len(sizes),
    visit_empty_groups=contracted == [0],  # the groups of the result: empty ones are zeros
  )
  words = [[int(count)], *(np.asarray(each).tolist() for each in metadata), [0]]
  return {
    node.name: dict(enumerate(words))
    for node in proto.instructions(found.parsed())
    if node.custom_call_target == "tpu_custom_call"
  }


def _as_device(target: str) -> None:
  """Lets Pallas ask for the device that it compiles for, where there is none."""
  from jax._src.pallas.mosaic import core, tpu_info

  for module in (core, tpu_info):  # of jax before and since 0.10
    module.get_device_kind = lambda: _KINDS[target]
    module.get_num_device_cores = lambda: 1
  tpu_info.is_tpu_device = lambda: True
