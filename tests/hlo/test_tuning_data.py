import pytest

from tests.support import comparing, hlo_modules
from tpugraphs_jax import hlo
from tpugraphs_jax.data import npz
from tpugraphs_jax.hlo import tuning_data
from tpugraphs_jax.hlo.__main__ import main
from tpugraphs_jax.hlo.proto import ConfigProfile, ModuleTuningData, TuningData


def _module(name="kernel"):
  main = hlo_modules.computation(
    hlo_modules.instruction("parameter", id=1, shape=[4, 6]),
    hlo_modules.instruction("reshape", id=2, operands=[1], shape=[24]),
    hlo_modules.instruction("dot", id=3, operands=[1, 1], shape=[4, 4]),
  )
  return hlo_modules.module(main, name=name)


def _layout_run(time_ns, layouts=(((0,), (1, 0)), ((1, 0), (1, 0), (0, 1))), **fields):
  run = ConfigProfile(**fields)
  run.profile.compute_time_ns = time_ns
  config = run.module_config.layout_config
  config.SetInParent()
  for layout in layouts:
    node = config.nodes.add()
    for dims in layout:
      node.tensors.add(dims=dims)
  return run


def _tile_run(time_ns, output=(2, 3), kernel=(), **fields):
  run = ConfigProfile(**fields)
  run.profile.compute_time_ns = time_ns
  run.op_config.tile_size_config.output_bounds.extend(output)
  run.op_config.tile_size_config.kernel_bounds.extend(kernel)
  run.op_config.tile_size_config.SetInParent()
  return run


def _layout(runs, nodes=(1, 2)):
  return ModuleTuningData(module=_module(), runs=runs, config_index_to_node=nodes)


def _good_layout():
  return _layout([_layout_run(5, is_default=True), _layout_run(7)])


_GOOD_TILES = [_tile_run(5, is_default=True), _tile_run(6)]


def _write(folder, message, name="program.pb"):
  path = folder / name
  path.write_bytes(message.SerializeToString())
  return path


def _read(folder, message, name="program.pb"):
  return hlo.read_tuning(_write(folder, message, name))


@pytest.mark.parametrize(
  "run, nodes, problem",
  [
    (_layout_run(0), (1, 2), "compute_time_ns"),
    (_layout_run(1, [()]), (1, 2), "layouts for 1"),
    (_layout_run(1, [[()] * 4, ()]), (1, 2), "tensors"),
    (_layout_run(1, [[(300,)], ()]), (1, 2), "dimension"),
    (_layout_run(1), (1, 3), "config_index_to_node"),
    (_layout_run(1), (), "config_index_to_node"),
  ],
)
def test_an_inconsistent_layout_record_is_refused(tmp_path, run, nodes, problem):
  message = _layout([_layout_run(2, is_default=True), run], nodes)
  message.fingerprint = 1
  with pytest.raises(ValueError, match=problem):
    _read(tmp_path, message)


def test_tile_modules_with_one_run_or_an_untiled_run_are_left_out_by_name(tmp_path):
  no_tile = ConfigProfile(error=True)
  modules = [
    ModuleTuningData(module=_module("single"), runs=_GOOD_TILES[:1]),
    ModuleTuningData(module=_module("untiled"), runs=[*_GOOD_TILES, no_tile]),
    ModuleTuningData(runs=_GOOD_TILES),
    ModuleTuningData(module=_module("good"), runs=_GOOD_TILES),
  ]
  read = _read(tmp_path, TuningData(modules=modules))
  assert len(read.graphs) == 1
  for line, name in zip(read.skipped, ("single", "untiled", "no HLO module"), strict=True):
    assert name in line


def test_a_kernel_without_a_default_fails_the_whole_tile_file(tmp_path):
  good = ModuleTuningData(module=_module("good"), runs=_GOOD_TILES)
  bad = ModuleTuningData(module=_module("bad"), runs=[_tile_run(5), _tile_run(6)])
  with pytest.raises(ValueError, match="bad"):
    _read(tmp_path, TuningData(modules=[good, bad]))


def test_converted_files_read_back_as_the_same_graphs(tmp_path):
  tile = TuningData(modules=[ModuleTuningData(module=_module(), fingerprint=11, runs=_GOOD_TILES)])
  layout = _good_layout()
  paths = [_write(tmp_path, tile, "kernels.pb"), _write(tmp_path, layout)]
  result = tuning_data.convert(paths, tmp_path / "out", processes=2)
  assert [path.name for path in result.written] == ["kernels_b.npz", "program.npz"]
  assert not result.failed and not result.skipped
  for path, read in zip(paths, (npz.read_tile, npz.read_layout)):
    expected = hlo.read_tuning(path).graphs[0]
    got = read(tmp_path / "out" / f"{expected.name}.npz")
    comparing.assert_same_graph(expected, got)


def test_conversion_goes_on_after_a_file_that_cannot_be_read(tmp_path, capsys):
  layout = _good_layout()
  module = tmp_path / "module.pb"
  module.write_bytes(_module().SerializeToString())
  paths = [module, tmp_path / "missing.pb", _write(tmp_path, layout)]
  out = tmp_path / "out"
  assert main(["convert", *map(str, paths), "--out", str(out), "--jobs", "1"]) == 1
  assert [path.name for path in out.iterdir()] == ["program.npz"]
  printed = capsys.readouterr()
  assert "1 files written" in printed.out and "2 inputs failed" in printed.out
  assert "module.pb: an HLO module without runs" in printed.err
  assert "missing.pb: no such file" in printed.err


def test_kernels_with_one_fingerprint_get_different_files(tmp_path):
  entry = ModuleTuningData(module=_module(), fingerprint=3, runs=_GOOD_TILES)
  path = _write(tmp_path, TuningData(modules=[entry, entry]))
  written = tuning_data.convert([path], tmp_path / "out").written
  assert [path.name for path in written] == ["program_3.npz", "program_3_2.npz"]


def test_what_the_reader_of_npz_refuses_is_not_written_and_others_are(tmp_path, capsys):
  twice = _good_layout()
  twice.config_index_to_node[1] = twice.config_index_to_node[0]
  layouts = ((6,), (1, 0)), ((1, 0), (1, 0), (0, 1))
  beyond = _layout([_layout_run(5, layouts=layouts, is_default=True), _layout_run(7)])
  messages = {"twice": twice, "beyond": beyond, "=good": _good_layout(), "good": _good_layout()}
  paths = [_write(tmp_path, message, f"{name}.pb") for name, message in messages.items()]
  assert main(["convert", *map(str, paths), "--out", str(tmp_path / "out"), "--jobs", "1"]) == 1
  assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.npz"]
  assert "names a node twice" in capsys.readouterr().err
