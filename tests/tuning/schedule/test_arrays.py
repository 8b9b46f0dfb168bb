"""Words of arrays are found at the addresses of kernels, of DMAs, and of parts of the arrays."""

import pytest

from tpugraphs_jax.tuning.schedule.arrays import Arrays
from tpugraphs_jax.tuning.schedule.words import Unknown

_ADDRESS, _GRANULE = 5 << 18, 32  # 8 words
_WORDS = list(range(100, 140))


@pytest.mark.parametrize("space, address", [("hbm", _ADDRESS), ("vmem", _ADDRESS << 4)])
@pytest.mark.parametrize("granules", [0, 1, 4])
def test_a_dma_reads_from_its_address_on(space, address, granules):
  arrays = Arrays(_GRANULE)
  arrays.write(_ADDRESS, _WORDS)
  assert list(arrays.read(space, address + granules)) == _WORDS[8 * granules :]
  assert arrays.read(space, address + 5) is None and arrays.read(space, address - 1) is None


def test_an_array_in_the_large_memory_may_have_an_address_as_on_the_chip():
  """A kernel writes it there with a DMA; the program reads it with another one."""
  kernel = Arrays(_GRANULE)
  kernel.copy("hbm", _ADDRESS << 4, _WORDS)
  program = Arrays(_GRANULE)
  program.write(_ADDRESS, kernel.written("hbm", _ADDRESS))
  assert program.read("hbm", _ADDRESS << 4) == _WORDS


def test_what_is_written_without_words_is_forgotten():
  arrays = Arrays(_GRANULE)
  arrays.write(_ADDRESS, _WORDS)
  arrays.copy("vmem", _ADDRESS << 4, None)
  assert arrays.read("vmem", _ADDRESS << 4) is None and arrays.read("hbm", _ADDRESS) == _WORDS
  arrays.write(_ADDRESS, None)
  assert arrays.read("hbm", _ADDRESS) is None


def test_an_unknown_address_has_no_words():
  arrays = Arrays(_GRANULE)
  arrays.write(Unknown("data"), _WORDS)
  assert arrays.read("hbm", Unknown("data")) is None and arrays.read("hbm", None) is None
  assert isinstance(arrays.first(Unknown("data")), Unknown)
  arrays.write(_ADDRESS, _WORDS)
  assert arrays.first(_ADDRESS) == 100
