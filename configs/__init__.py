"""Configs of the two commands: `tile.py`, `layout.py`, and the systems that they name."""
