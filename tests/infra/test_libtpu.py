"""libtpu is quiet on machines without a TPU, and left alone on all others."""

import os

import pytest

from tpugraphs_jax.infra import libtpu


@pytest.mark.parametrize("is_installed, may_have_tpu, kept", [
    (True, False, False), (True, True, True), (False, False, True)])
def test_the_environment_changes_only_without_a_tpu(monkeypatch, is_installed, may_have_tpu, kept):
  monkeypatch.setattr(os, "environ", {"TPU_ACCELERATOR_TYPE": "v4-8"})
  monkeypatch.setattr(libtpu.importlib.util, "find_spec", lambda name: is_installed or None)
  monkeypatch.setattr(libtpu, "may_have_tpu", lambda: may_have_tpu)
  libtpu.be_quiet()
  assert os.environ["TPU_ACCELERATOR_TYPE"] == "v4-8"  # the user's own
  assert (len(os.environ) == 1) == kept
