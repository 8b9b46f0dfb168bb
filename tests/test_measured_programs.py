"""Figures of `benchmarks/measured_programs.py`, without libtpu and without tokamax."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import measured_programs, measured_sources
from tpugraphs_jax.tuning.schedule.chips import chips


def _program(name, ms, *, source=measured_sources.TOKAMAX, group="pallas_x", variant="", key="{}"):
  return measured_sources.Program(source, group, name, "tpu:v6e", ms, key, variant, lambda: None)


def _chips(count):
  return [dataclasses.replace(chips()["tpu:v6e"], share=0.3)] * count


def _row(name, measured, simulated, **options):
  program = _program(name, measured, **options)
  return measured_programs.Row(program, simulated, "", 1.0, None, 0.5, None)


@pytest.fixture
def data(tmp_path):
  """A folder with a product of each kind, one of them too short, and two caches of tokamax."""
  (tmp_path / "gemm.csv").write_text(
    "sku,family,M,N,K,dtype,median_s,iqr_s,n_iters\n"
    "v5e,random,128,256,512,bf16,0.0003056,1e-6,20\n"
    "v6e,random,128,256,512,int8,0.0002187,1e-6,20\n"
    "v6e,random,8,8,8,bf16,0.0001188,1e-6,20\n"
  )
  cache = {'{"q":"bf16[8,128]"}': {'{"block":8}': {"evaluation_times_ms": [3.0, 1.0, 2.0]}}}
  plain = {
    '{"q":"bf16[8,128]","return_residuals":false}': {"{}": {"evaluation_times_ms": [5.0]}},
    '{"q":"bf16[9,128]"}': {"{}": {"evaluation_times_ms": [5.0]}},
  }
  folder = tmp_path / "tokamax" / "tpu_v6_lite"
  folder.mkdir(parents=True)
  (folder / "pallas_mosaic_tpu_flash_attention.json").write_text(json.dumps(cache))
  (folder / "dot_product_attention.json").write_text(json.dumps(plain))
  (folder / "normalization.json").write_text(json.dumps(plain))
  return tmp_path


def test_products_are_measured_without_their_launch(data):
  products = [program for program in measured_sources.read(data) if program.source == "products"]
  assert [program.target for program in products] == ["tpu:v5e", "tpu:v6e"]
  assert [round(program.milliseconds, 6) for program in products] == [0.2, 0.1]


def test_ways_to_compute_the_same_are_found_by_their_arguments(data):
  programs = measured_sources.read(data)
  (group,) = measured_sources.choices(programs)
  assert {program.group: program.milliseconds for program in group} == {
    "pallas_mosaic_tpu_flash_attention": 2.0,
    "dot_product_attention": 5.0,
  }
  assert len(measured_sources.sample_choices(programs, 3, seed=0)) == 2
  assert not measured_sources.sample_choices(programs, 0, seed=0)


def test_a_larger_sample_contains_the_smaller_one_and_no_plain_operation(data):
  programs = measured_sources.read(data)
  single, many = (measured_sources.sample(programs, count, seed=1) for count in (1, 9))
  assert set(single) <= set(many)
  assert not any(
    measured_sources.is_plain(program.group) for program in many if program.source == "tokamax"
  )


def test_a_fit_finds_the_chip_and_the_factor_that_made_the_times():
  ratios = np.array([[0.7, 0.9, 1.4, 1.2], [0.8, 0.8, 0.8, 0.8], [1.0, 1.3, 0.6, 1.1]])
  found = measured_programs.fit(_chips(3), ratios, ["a", "a", "b", "b"])
  assert (found.point, found.error) == (1, pytest.approx(0, abs=1e-9))
  assert found.factor == pytest.approx(1.25)


def test_a_source_that_is_left_out_does_not_shape_its_constants():
  ratios = np.array([[1.0, 1.0, 3.0], [2.0, 2.1, 1.0]])
  without = measured_programs.left_out(_chips(2), ratios, ["a", "a", "b"])
  assert without[2] == pytest.approx(3.0)  # the first chip fits the others
  assert without[:2] == pytest.approx([2.0, 2.1])  # the second chip fits b without a factor
  assert np.isnan(measured_programs.left_out(_chips(2), ratios[:, :2], ["a", "a"])).all()


def test_every_group_has_the_same_weight_in_a_fit():
  ratios = np.array([[1.0, 1.0, 1.0, 1.0, 2.0], [1.2, 1.2, 1.2, 1.2, 1.2]])
  assert measured_programs.fit(_chips(2), ratios, ["a"] * 4 + ["b"]).point == 1


def test_a_program_that_was_measured_otherwise_does_not_shape_a_fit():
  found = measured_programs.fit(_chips(1), np.array([[0.8, 0.8, 0.8, 8.0]]), ["a"] * 4)
  assert (found.factor, found.error) == (pytest.approx(1.25), pytest.approx(0, abs=1e-9))


def test_of_constants_that_fit_alike_those_near_the_published_ones_are_chosen():
  far, near = (dataclasses.replace(chips()["tpu:v6e"], share=share) for share in (0.5, 0.9))
  assert measured_programs.fit([far, near], np.ones((2, 3)), ["a"] * 3).point == 1
  assert measured_programs.fit([near, far], np.full((2, 3), 2.0), ["a"] * 3).point == 1  # 0.9 * 2


def test_ragged_products_of_unknown_sizes_are_not_in_a_fit():
  row = _row("a", 1.0, 1.0)
  unknown = dataclasses.replace(row, program=dataclasses.replace(row.program, is_exact=False))
  assert measured_programs.usable([row, unknown]) == [row]


def test_a_summary_has_errors_and_the_order():
  rows = [_row("a", 1.0, 1.1), _row("b", 2.0, 1.8), _row("c", 4.0, 4.4), _row("d", 3.0, None)]
  found = measured_programs.summary(rows, "simulated")
  assert (found["programs"], found["mean"], found["median"]) == (3, 0.1, 0.1)
  assert found["tau_b"] == 1.0
  assert measured_programs.summary(rows[3:], "simulated") == {"programs": 0}


def test_the_regret_is_that_of_the_measured_time_of_the_choice():
  key = '{"q":"bf16[8,128]"}'
  ways = [
    _row("a", 2.0, 5.0, key=key),
    _row("b", 3.0, 4.0, key=key),
    _row("c", 1.0, None, key=key),
    _row("alone", 1.0, 1.0, key='{"q":"bf16[9]"}'),
  ]
  (found,) = measured_programs.decisions(ways)
  assert (found["ways"], found["timed"], found["regret"], found["spread"]) == (3, 2, 2.0, 2.0)
  assert found["choice"] == "block sizes, pallas x"
  assert found["apart"] == pytest.approx(abs((4 / 5) / (3 / 2) - 1), abs=1e-4)


def test_an_interval_covers_nine_of_ten_further_programs():
  rng = np.random.default_rng(0)
  inside = []
  for _ in range(400):
    *seen, further = np.exp(rng.normal(size=20) / 10)
    low, high = measured_programs.interval(np.array(seen))
    inside.append(low <= 1 / further <= high)
  assert 0.87 < np.mean(inside) < 0.96


def test_programs_are_counted_in_the_interval_of_the_other_half():
  names = [f"program {number}" for number in range(40)]
  same = np.ones(40)
  assert measured_programs.inside(same, ["a", "b"] * 20, names) == {"a": [20, 20], "b": [20, 20]}
  apart = np.where(np.arange(40) % 2, 3.0, 1.0) + np.arange(40) / 1000
  found = measured_programs.inside(apart, ["a"] * 39 + ["b"], names)
  assert (
    found["a"][1] == 39 and found["a"][0] + found["b"][0] < 40
  )  # the ends of a half lie outside
  assert measured_programs.inside(same, ["a"] * 40, names) == {}


def test_the_place_of_block_sizes_counts_candidates_that_are_not_slower():
  best = _row("best", 2.0, 7.0, variant="measured")  # of another version than the candidates
  others = [
    dataclasses.replace(
      row, program=dataclasses.replace(row.program, base="best", variant=row.program.name)
    )
    for row in (
      _row("best/1", np.nan, 4.0),
      _row("best/2", np.nan, 5.0),
      _row("best/3", np.nan, 6.0),
      _row("best/4", np.nan, None),
      _row("measured", np.nan, 5.0),
    )
  ]
  (found,) = measured_programs.block_sizes([best, *others], ["best/5", "other/1"])
  assert (found["candidates"], found["refused"], found["place"]) == (4, 1, 3)
  assert (found["by_first"], found["spread"]) == (1.25, 1.5)
  assert measured_programs.usable([best, *others]) == [best]


def test_block_sizes_are_compared_for_the_best_configuration_of_the_shortest_kernels():
  def kernel(name, ms, rows):
    return _program(
      name, ms, group="pallas_mosaic_tpu_flash_attention", key=f'{{"q":"bf16[{rows},128]"}}'
    )

  programs = [kernel("slow", 3.0, 8), kernel("fast", 2.0, 8), kernel("long", 9.0, 64)]
  assert measured_sources.shortest(programs, 1) == [programs[1]]
  assert measured_sources.shortest(programs, 2) == programs[1:]
  assert measured_sources.shortest(programs, 0) == []
