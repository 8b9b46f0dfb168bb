"""Rankers: flax modules from a padded batch to scores `[G, C]`; see `interface`.

Importing any of these modules registers the project's own rankers.
"""

from tpugraphs_jax.models import res_model, sage, systems, tables, tile
