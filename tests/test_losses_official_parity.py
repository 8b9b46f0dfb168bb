"""Losses and metrics against the numbers recorded from the official code.

Goes over every `losses_metrics*.npz` in the folder that TPUGRAPHS_PARITY_DIR
names. An entry `listmle_t10_ties_grad` is the gradient of ListMLE at temperature
10 for `labels_ties`; `meta`, where there is one, may name the combined losses.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
import re

import jax
import numpy as np
import pytest

from tpugraphs_jax import losses, metrics

FOLDER = Path(os.environ.get("TPUGRAPHS_PARITY_DIR") or Path(__file__).parent / "data" / "parity")
FILES = sorted(FOLDER.glob("losses_metrics*.npz"))
INPUTS = re.compile(r"(labels|logits)(_.+)?|runtimes|preds|meta")
LOSS = re.compile(
  r"(?P<loss>listmle|hinge|logistic|mse|combined)(_t(?P<temperature>\d+))?"
  r"(?P<suffix>_.+?)??(?P<grad>_grad)?"
)
OFFICIAL = {
  "listmle": "ListMLELoss:1",
  "hinge": "PairwiseHingeLoss:1",
  "logistic": "PairwiseLogisticLoss:1",
  "mse": "MSE:1",
  "combined": "ListMLELoss:1,MSE:0.02",
}
# The official tile trainer's temperature, where an entry's name states none.
TILE_TEMPERATURE = 10.0


def _slates(record, suffix):
  """Logits and labels that an entry with this suffix was computed from."""
  return record.get("logits" + suffix, record["logits"]), record["labels" + suffix]


@functools.cache
def _value_and_grad(weighted, temperature):
  def value(scores, labels):
    options = losses.LossOptions(temperature=temperature)
    sums = losses.loss_sums(weighted, scores, labels, options=options)
    return losses.combine(weighted, *sums)

  return jax.jit(jax.value_and_grad(value))


def _check_loss(record, key, match):
  meta = json.loads(str(record["meta"])) if "meta" in record else {}
  text = OFFICIAL[match["loss"]]
  if match["loss"] == "combined":
    text = meta.get("loss", text)
  weighted = losses.parse_losses(text)
  temperature = float(match["temperature"] or TILE_TEMPERATURE)
  logits, labels = _slates(record, match["suffix"] or "")
  value, grad = _value_and_grad(weighted, temperature)(logits, labels)
  actual = grad if match["grad"] else value
  scale = np.abs(record[key]).max()
  np.testing.assert_allclose(actual, record[key], rtol=1e-5, atol=1e-6 * scale, err_msg=key)


def _check_opa(record, key):
  logits, labels = _slates(record, key.removeprefix("opa"))
  counts = [metrics.ordered_pairs(s, y) for s, y in zip(logits, labels)]
  np.testing.assert_allclose(metrics.pooled_opa(counts), record[key], rtol=1e-6)


def _check_per_graph(record, key):
  graphs = list(zip(record["preds"], record["runtimes"], strict=True))
  if key == "kendalltau":
    actual = [metrics.kendall_tau(s, y) for s, y in graphs]
  else:
    k = int(key.removeprefix("slowdown_top"))
    actual = [metrics.top_k_slowdown(s, y, (k,))[k] for s, y in graphs]
  np.testing.assert_allclose(actual, record[key], rtol=1e-9, atol=1e-12)


def test_there_are_recorded_losses_and_metrics():
  assert FILES, f"no losses_metrics*.npz in {FOLDER}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_losses_gradients_and_metrics_equal_the_recorded_ones(path):
  with np.load(path) as file:
    record = dict(file)
  outputs = [key for key in record if not INPUTS.fullmatch(key)]
  assert outputs
  for key in outputs:
    if match := LOSS.fullmatch(key):
      _check_loss(record, key, match)
    elif re.fullmatch(r"opa(_.+)?", key):
      _check_opa(record, key)
    elif re.fullmatch(r"kendalltau|slowdown_top\d+", key):
      _check_per_graph(record, key)
    else:
      pytest.fail(f"{path.name}: no check for entry {key!r}")
