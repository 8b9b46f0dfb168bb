"""Ranker families: flax modules from a padded batch to scores `[G, C]`; see `base`.

Importing any of these modules registers the project's own rankers.
"""

from tpugraphs_jax.rankers.composed import edges, ranker
from tpugraphs_jax.rankers.layout import res_model, sage
from tpugraphs_jax.rankers.tables import network
from tpugraphs_jax.rankers.tile import networks
