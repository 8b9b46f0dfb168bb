"""The examples in the docstrings of the API page give what they say."""

import doctest
import importlib

import commands
import pytest

MODULES = ("", ".data.npz", ".hlo.module_graph", ".infra.jobs", ".infra.files", ".losses",
           ".metrics", ".run.configs", ".serve.ensemble", ".serve.ranker")


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name, monkeypatch):
  monkeypatch.chdir(commands.ROOT)  # where data/own is
  found = doctest.testmod(importlib.import_module(f"tpugraphs_jax{name}"))
  assert found.attempted and not found.failed
