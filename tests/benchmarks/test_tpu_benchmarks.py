"""What the TPU benchmarks compile computes what it should, and their tables show it."""

import jax.numpy as jnp
import numpy as np
import pytest

import commands


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(commands.ROOT / "benchmarks"))


def test_every_way_to_sum_over_neighbours_gives_the_same_sums():
  import tpu_sums
  import workloads
  nodes = 300  # no multiple of a block
  edges = workloads.edges(np.random.default_rng(3), nodes)
  edges = np.concatenate([edges, edges[:5]])  # some twice
  x = np.random.default_rng(4).integers(-3, 4, (nodes, 6)).astype(np.float32)
  expected = np.zeros_like(x)
  for consumer, producer in edges:
    expected[consumer] += x[producer]
  ways = tpu_sums.formulations(edges, nodes)
  assert len(ways) == 7
  for name, (function, arguments) in ways.items():
    np.testing.assert_array_equal(function(jnp.asarray(x), *arguments), expected, err_msg=name)


def test_the_bytes_of_a_sum_are_a_row_per_edge_and_per_node():
  import tpu_sums
  assert tpu_sums.bytes_ms(np.zeros((9414, 2))) == pytest.approx(
      1e3 * (9414 + 6000) * 4096 / 450e9)


def test_tables_have_a_line_per_figure_and_name_failures():
  import tpu_compile
  import tpu_sums
  row = {"compile_s": 20.4, "code_mb": 36.84, "memory_mib": 4331.0, "core_gib": 16.0,
         "estimated_cycles": 7_540_000, "optimal_ms": 8.4, "gathers": 51, "scatters": 42}
  text = tpu_compile.table({
      "machine": {}, "SAGE/train/v3": row, "tables/score/v6e": {"error": "out of memory"}})
  assert text.splitlines()[2] == (
      "| SAGE, train | v3 | 20 s | 36.8 MB | 4,331 MiB of 16 GiB | 7.54 M | 8.40 ms | 51 | 42 |")
  assert text.splitlines()[3].startswith("| tables, score | v6e | out of memory |")
  row["kernels_without_estimate"] = 2
  assert "| 7.54 M, 2 kernels unknown |" in tpu_compile.table({"SAGE/train/v3": row})
  assert "| unknown |" in tpu_compile.table({"SAGE/train/v4": row | {"optimal_ms": -32990.05}})
  del row["kernels_without_estimate"]
  text = tpu_sums.table({"ways": {"sorted segment sum": row}})
  assert text.splitlines()[2] == "| sorted segment sum | 7,540 k | 8.40 ms | 51 | 42 |"


@pytest.mark.parametrize("case", ["tile, small", "SAGE, small"])
def test_cases_are_the_configs_of_the_two_commands(case):
  import tpu_compile
  config = tpu_compile.config_of(case)
  assert config.task == ("tile" if case.startswith("tile") else "layout")
  assert config.data.neighbour_slots == 0  # as on a TPU
  assert set(tpu_compile.CASES) >= {"tile", "ResModel", "SAGE", "tables", "gst_ed"}


def test_every_preset_is_a_case():
  import tpu_compile
  from tpugraphs_jax.run import published, published_tiles
  found = {case for case in tpu_compile.V3_ONLY if published.PREFIX in case}
  assert len(found) == len(published.PRESETS) + len(published_tiles.PRESETS)
  for case in found:
    config = tpu_compile.config_of(case)
    assert config.model.name in published.MODELS and case.startswith(config.task.replace(
        "segments", "layout"))


def test_blind_searches_spend_the_budget_and_begin_with_the_default():
  import tune

  class Problem:
    options = [np.array([0, 1, 2]), np.array([0]), np.array([0, 3, 4, 5])]

    def candidates(self, count):
      every = [(a, 0, b) for a in self.options[0] for b in self.options[2]]
      return [tuple(map(int, numbers)) for numbers in every][:count]

  cost = lambda numbers: 100 - 10 * numbers[0] - (numbers[2] == 4)
  asked = []

  def label(candidates):
    asked.extend(candidates)
    return {numbers: cost(numbers) for numbers in candidates if numbers != (1, 0, 3)}

  for search in (tune.random_search, tune.coordinate_search):
    for seed in range(3):
      asked.clear()
      values = search(Problem(), label, 6, seed)
      assert len(values) == len(asked) == len(set(asked)) == 6
      assert asked[0] == (0, 0, 0) and values[0] == 100
      if search is tune.coordinate_search:
        best = (0, 0, 0)
        for numbers in asked[1:]:  # one group at a time away from the best so far
          assert sum(a != b for a, b in zip(numbers, best)) == 1
          if numbers != (1, 0, 3) and cost(numbers) < cost(best):
            best = numbers


def test_the_model_search_labels_what_the_model_puts_first(monkeypatch):
  import tune
  monkeypatch.setattr(tune.tuning, "rank", lambda *args: [(0,), (2,), (1,)])

  class Problem:
    def candidates(self, count):
      return [(0,), (1,), (2,)][:count]

  labels = {(0,): 10, (2,): 8, (1,): 4}
  found = tune.model_search(None)(Problem(), lambda tried: {n: labels[n] for n in tried}, 2, 0)
  assert found == [10, 8]


@pytest.mark.parametrize("message, expected", [
    ("a\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: no room\n\n  detail\n",
     "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: no room"),
    ("one\nlast\n", "last"), ("", "no message")])
def test_a_failure_is_told_by_the_line_of_its_exception(message, expected):
  import tpu_compile
  assert tpu_compile._why(message) == expected  # pylint: disable=protected-access
