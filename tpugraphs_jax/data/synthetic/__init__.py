"""Synthetic collections in the released form, with runtimes from a machine model."""

from tpugraphs_jax.data.synthetic.files import Ceiling
from tpugraphs_jax.data.synthetic.files import read_ceiling
from tpugraphs_jax.data.synthetic.generate import generate

__all__ = ["Ceiling", "generate", "read_ceiling"]
