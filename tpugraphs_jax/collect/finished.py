"""Whether a program is collected already, also where its journal is gone."""

from __future__ import annotations

import json
from typing import Any

from tpugraphs_jax.collect import labels
from tpugraphs_jax.collect.job import Job
from tpugraphs_jax.data import npz


def is_finished(job: Job, header: dict[str, Any], label: labels.Label) -> bool:
  """Whether the job's files are whole and what the job would write.

  Args:
    job: a program and what is asked for.
    header: source, label, versions, seed and hash of the program, as in the sidecar.
    label: says what the sidecar's raw numbers are worth.
  """
  try:
    record = json.loads(job.sidecar.read_text())
    stored = npz.read_layout(job.npz).configs.runtime_ns.tolist()
    labelled = [label.value(raw) for raw in record["configs"]]
  except (OSError, ValueError, KeyError, TypeError):
    return False  # missing, or damaged: it is made anew
  asked = record.get("configs_asked", len(labelled))
  is_same = all(record.get(key) == value for key, value in header.items())
  return is_same and record["split"] == job.split and asked == job.configs and stored == labelled
