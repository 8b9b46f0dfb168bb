"""Trains every ranker on your data for the same time: `python -m tpugraphs_jax.leaderboard`."""
