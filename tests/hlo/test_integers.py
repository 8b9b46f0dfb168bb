"""Integers of a compiled program are those that it computes; assumed ones fit their meaning."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpugraphs_jax.hlo import integers, proto
from tpugraphs_jax.hlo.integers import ASSUMED, HIGHEST, Integers, LOWEST, Meaning

_S = jax.ShapeDtypeStruct
_X = np.array([[5, -3, 70, 2], [0, 9, -8, 4]], np.int32)


def _module(function, *shapes):
  executable = jax.jit(function).lower(*shapes).compile().runtime_executable()
  return proto.HloModuleProto.FromString(
    executable.hlo_modules()[0].as_serialized_hlo_module_proto()
  )


def _root(module):
  return next(c for c in module.computations if c.id == module.entry_computation_id).root_id


@pytest.mark.parametrize(
  "function",
  [
    lambda x: jnp.clip(x + 3, 0, 60) * 2,
    lambda x: jnp.where(x < 0, x + 100, x).T.reshape(-1),
    lambda x: jnp.sort(x.reshape(-1)),
    lambda x: jnp.argsort(x.reshape(-1)),
    lambda x: jnp.concatenate([x[:, 1:3], jnp.flip(x, 0)], 1),
    lambda x: jnp.pad(x, ((1, 0), (2, 1)), constant_values=7),
    lambda x: x.sum(1) - jnp.arange(2) + (x > 3).sum(1),
    lambda x: jnp.broadcast_to(x[:, None], (2, 3, 4)).astype(jnp.int16).astype(jnp.int32),
    lambda x: (x << 2) ^ (x >> 1) & 15 | jnp.abs(x),
    lambda x: jnp.minimum(x, x.max()) % 7,
  ],
)
def test_integers_are_those_that_the_program_computes(function):
  module = _module(function, _S(_X.shape, "int32"))
  found = Integers(module, {0: _X})
  assert np.array_equal(found.of(_root(module)), function(jnp.asarray(_X)))
  assert not found.assumed


def test_a_loop_passes_on_what_no_iteration_changes():
  def function(x, y):
    return jax.lax.fori_loop(0, 3, lambda i, c: (c[0], c[1] + y[c[0][i]]), (x, jnp.zeros(())))

  module = _module(function, _S((4,), "int32"), _S((10,), "float32"))
  found = Integers(module, {0: np.array([4, 3, 2, 1], np.int32)})
  (loop,) = (node for node in proto.instructions(module) if node.opcode == "while")
  bodies = [c for c in module.computations if c.id in loop.called_computation_ids]
  values = [
    found.of(node.id)
    for body in (*bodies, *(c for c in module.computations if c.id == module.entry_computation_id))
    for node in body.instructions
    if node.opcode == "get-tuple-element" and node.shape.dimensions == [4]
  ]
  after = found.of(loop.id)  # its result
  assert [part is not None for part in after].count(True) == 1
  assert values and all(np.array_equal(value, [4, 3, 2, 1]) for value in values)


def test_what_an_array_of_another_shape_says_is_not_used():
  module = _module(lambda x: x + 1, _S(_X.shape, "int32"))
  assert Integers(module, {0: _X[:1]}).of(_root(module)) is None


def _tpu_like(x, i, u, p):
  return x[i], x.at[i].add(u), jax.lax.dynamic_slice(x, (p, 0), (2, 4))


def _first_meanings(module):
  found = Integers(module, {})
  entry = next(c for c in module.computations if c.id == module.entry_computation_id)
  return [
    found.meaning(node)
    for node in sorted(entry.instructions, key=lambda node: node.parameter_number)
    if node.opcode == "parameter"
  ]


def test_indices_and_positions_mean_what_reads_them():
  shapes = _S((50, 4), "float32"), _S((6,), "int32"), _S((6, 4), "float32"), _S((), "int32")
  lowered = jax.jit(_tpu_like).lower(*shapes).compiler_ir("hlo")
  module = proto.HloModuleProto.FromString(lowered.as_serialized_hlo_module_proto())
  _, indices, _, position = _first_meanings(module)
  assert (indices.kind, indices.limits) == (integers.INDEX, (50,))
  assert (position.kind, position.limits) == (integers.POSITION, (48,))


def test_an_index_in_a_part_of_a_word_means_what_reads_the_part():
  """As the compiler packs the components of an index into one word before a scatter."""

  def function(x, i, u):
    words = jnp.arange(6) << 16 | i & 0xFFFF
    parts = jnp.stack([jax.lax.shift_right_logical(words, 16), words & 0xFFFF], 1)
    return x.at[parts[:, 0], parts[:, 1]].add(u)

  shapes = _S((6, 50, 4), "float32"), _S((6,), "int32"), _S((6, 4), "float32")
  lowered = jax.jit(function).lower(*shapes).compiler_ir("hlo")
  module = proto.HloModuleProto.FromString(lowered.as_serialized_hlo_module_proto())
  meaning = _first_meanings(module)[1]
  assert (meaning.kind, meaning.limits) == (integers.INDEX, (6, 50))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,)])
@pytest.mark.parametrize("how", [LOWEST, ASSUMED, HIGHEST])
def test_drawn_integers_fit_their_meaning(shape, how):
  size = int(np.prod(shape))
  indices = Meaning(integers.INDEX, (11,), "gather").draw(shape, "i", how)
  assert indices.shape == shape and np.all((indices >= 0) & (indices < 11))
  assert np.array_equal(indices, Meaning(integers.INDEX, (11,), "x").draw(shape, "i", how))
  position = Meaning(integers.POSITION, (10,), "slice").draw(shape, "p", how)
  assert np.all(position == {LOWEST: 0, ASSUMED: 5, HIGHEST: 10}[how])
  lengths = Meaning(integers.LENGTHS, (9,), "lengths").draw(shape, "n", how)
  assert np.all(lengths == {LOWEST: 1, ASSUMED: 4, HIGHEST: 9}[how])
  if size:
    groups = Meaning(integers.GROUPS, (23,), "product").draw(shape, "g", how)
    assert groups.sum() == 23 and groups.min() >= 0
    if how == ASSUMED:
      assert groups.max() - groups.min() <= 1
    else:
      assert groups.flat[0] == (23 if how == LOWEST or size == 1 else groups.min())


@pytest.mark.parametrize("how", [LOWEST, ASSUMED, HIGHEST])
def test_an_index_into_nothing_is_zero_and_no_groups_have_no_rows(how):
  assert not Meaning(integers.INDEX, (0,), "gather").draw((3,), "i", how).any()
  assert Meaning(integers.GROUPS, (5,), "product").draw((0,), "g", how).shape == (0,)


def test_starts_are_those_of_equal_parts():
  starts = Meaning(integers.STARTS, (12,), "starts").draw((5,), "s", ASSUMED)
  assert starts.tolist() == [0, 3, 6, 9, 12]


def test_components_of_an_index_have_their_own_dimensions():
  drawn = Meaning(integers.INDEX, (2, 900), "scatter").draw((500, 2), "i", ASSUMED)
  assert drawn[:, 0].max() == 1 and drawn[:, 1].max() > 800


def _layout(minor_to_major, tile=()):
  layout = proto.ShapeProto().layout
  layout.minor_to_major.extend(minor_to_major)
  if tile:
    layout.tiles.add().dimensions.extend(tile)
  return layout


@pytest.mark.parametrize(
  "shape, order, tile",
  [
    ((5,), (0,), ()),
    ((5,), (0,), (4,)),
    ((3, 4), (1, 0), ()),
    ((3, 4), (0, 1), ()),
    ((3, 5), (1, 0), (2, 4)),
    ((5, 2), (0, 1), (2, 4)),
    ((2, 3, 5), (1, 2, 0), (2, 2)),
    ((2, 3), (1, 0), (4,)),
    ((), (), (4,)),
    ((0,), (0,), (4,)),
  ],
)
def test_memory_has_the_order_of_layout_and_tiles(shape, order, tile):
  """Against the definition: each element is looked up, tile by tile, in the order of memory."""
  array = np.arange(1, 1 + int(np.prod(shape)), dtype=np.int32).reshape(shape)
  major = [shape[dim] for dim in reversed(order)]
  sizes = [1] * (len(major) - len(tile)) + list(tile[max(0, len(tile) - len(major)) :])
  expected = []
  for outer in itertools.product(*(range(-(-n // t)) for n, t in zip(major, sizes))):
    for inner in itertools.product(*map(range, sizes)):
      at = [o * t + i for o, t, i in zip(outer, sizes, inner)]
      inside = all(a < n for a, n in zip(at, major))
      index = [0] * len(shape)
      for dim, a in zip(reversed(order), at):
        index[dim] = a
      expected.append(int(array[tuple(index)]) if inside else 0)
  assert integers.to_memory(array, _layout(order, tile)).tolist() == expected
  target = proto.ShapeProto(dimensions=shape)
  target.layout.CopyFrom(_layout(order, tile))
  assert np.array_equal(integers.from_memory(np.array(expected, np.int32), target), array)


def test_words_hold_narrow_integers_of_rows_below_each_other():
  """Tiles of 4 x 128 whose columns are words, as a TPU keeps integers of 8 bits."""
  array = np.arange(6 * 130).reshape(6, 130) % 120
  layout = _layout((1, 0), (4, 128))
  layout.tiles.add().dimensions.extend((4, 1))
  words = integers.to_memory(array.astype(np.int8), layout).reshape(-1, 4)
  for row, column in itertools.product(range(6), range(130)):
    tile = row // 4 * 2 + column // 128
    assert words[tile * 128 + column % 128, row % 4] == array[row, column]
  module = _module(lambda x: x + jnp.int8(1), _S((6,), "int8"))
  values = np.array([1, 2, 3, -4, 5, 6], np.int8)
  words = Integers(module, {0: values}).words(_root(module))
  assert words.view(np.int8)[:6].tolist() == (values + 1).tolist() and words.dtype == np.int32


def test_a_tile_beyond_all_memory_is_refused():
  with pytest.raises(ValueError, match="places"):
    integers.to_memory(np.zeros((2, 2), np.int32), _layout((1, 0), (1 << 20, 1 << 20)))
