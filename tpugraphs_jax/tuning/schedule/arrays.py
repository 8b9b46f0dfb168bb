"""Words of integer arrays by their addresses, of which DMAs copy parts into scalar memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpugraphs_jax.tuning.schedule.words import Unknown

WORD = 4  # bytes
_MASK = 0xFFFFFFFF
_COMPUTED = Unknown("it depends on a value that vector operations compute", is_data=True)
_ON_CHIP = 4  # a DMA has the address of an array on the chip in granules, 16 in a row of 128 words


def pointer_of(address: int) -> int:
  """The address of an array on the chip as DMAs get it, in collectives of the large memory too."""
  return address << _ON_CHIP & _MASK


class Arrays:
  """Arrays in the large memory and on the chip.

  Args:
    granule: bytes of the unit of an address, in which DMAs count.
  """

  def __init__(self, granule: int):
    self._words = granule // WORD  # of a granule
    self._on_chip: dict[int, Sequence[Any]] = {}
    self._in_hbm: dict[int, Sequence[Any]] = {}

  def write(self, address: Any, words: Sequence[Any] | None) -> None:
    """Keeps the words of an array at an address as kernels get it; None forgets them."""
    if address.__class__ is not int:
      return
    pointer = pointer_of(address)
    places = ((address, self._in_hbm), (pointer, self._on_chip), (pointer, self._in_hbm))
    for place, arrays in places:
      if words is None:
        arrays.pop(place, None)
      else:
        arrays[place] = words

  def copy(self, space: str, address: Any, words: Sequence[Any] | None) -> None:
    """Keeps the words that a DMA writes at an address; None forgets them."""
    if address.__class__ is int:
      arrays = self._in_hbm if space == "hbm" else self._on_chip
      if words is None:
        arrays.pop(address, None)
      else:
        arrays[address] = words

  def read(self, space: str, address: Any) -> Sequence[Any] | None:
    """The words from an address of a DMA on; None where they are not known.

    An array that the program has in the large memory may have an address as on the chip.
    """
    if address.__class__ is not int:
      return None
    found = self._found(self._in_hbm, address) if space == "hbm" else None
    return self._found(self._on_chip, address) if found is None else found

  def _found(self, arrays: Mapping[int, Sequence[Any]], address: int) -> Sequence[Any] | None:
    if address in arrays:
      return arrays[address]
    for start, words in arrays.items():
      if 0 < (first := (address - start) * self._words) < len(words):
        return words[first:]
    return None

  def written(self, space: str, address: int) -> Sequence[Any] | None:
    """The words of an array at an address as kernels get it; None where they are not known."""
    found = self.read(space, address) if space == "hbm" else None
    return self.read(space, pointer_of(address)) if found is None else found

  def first(self, address: Any) -> Any:
    """The first word of a vector on the chip, at the address of a load."""
    words = None
    if address.__class__ is int:
      words = self.read("vmem", pointer_of(address))
    return words[0] if words else _COMPUTED
