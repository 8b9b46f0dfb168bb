"""The names under which store and collect call `jobs`, until they call `jobs.run`."""

from tpugraphs_jax.jobs import run_on_beam as run_all, split_flags  # noqa: F401
