"""Synthetic collections in the released form, with runtimes from a machine model.

`generate` writes any of the five collections; `read_ceiling` gives the
noise-free runtimes of one file, against which every score can be set.

The machine (`program`) has a vector unit, a matrix unit and a memory, and
keeps tensors in registers of 8 x 128 elements. From it follow two answers:

* A fused kernel (`tiles`) is computed tile by tile. Each tile
  costs a start, the larger of its arithmetic and its memory traffic, and what
  does not fit on chip. A tile needs the axes that it does not cut in full:
  whatever feeds a reduction or one operand of a product is computed anew for
  every tile along the axes it lacks. So the best tile depends on which
  instructions feed what, not on which there are.
* In a whole program (`layouts`) each convolution, dot and
  reshape has its output in one of two orders. An order costs the padding of its
  two minor dimensions, in arithmetic and traffic of the instruction and of all
  elementwise ones that take it over, and a copy wherever two orders meet. So the
  best order depends on an instruction's shape and on its neighbours' orders.

Configurations are proposed as the released searches did. Measurements carry
multiplicative noise of the size seen in the released data. `files` has the numbers
and sizes of the graphs, and the defects of the released data that can be put in.
"""

from tpugraphs_jax.data.synthetic.files import Ceiling, generate, read_ceiling

__all__ = ["Ceiling", "generate", "read_ceiling"]
