"""The Python of docs/training_loop.md."""

import importlib.util
import json
import re

import pytest

from tests.support import commands
from tpugraphs_jax.tuning import labels
from tpugraphs_jax.tuning.problem import Problem

# By heading, the blocks of each section.
_SECTIONS = {
  section.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
  for section in re.split(
    r"^#+ ", (commands.ROOT / "docs/training_loop.md").read_text(), flags=re.MULTILINE
  )
}
_SECTIONS = {heading: blocks for heading, blocks in _SECTIONS.items() if blocks}


@pytest.mark.parametrize("heading", _SECTIONS)
def test_a_step_is_tuned_saved_and_applied(heading, monkeypatch, tmp_path):
  """In place of the TPU compiler, labels by which the choice with the most changes is the best."""
  if heading == "Equinox" and not importlib.util.find_spec("equinox"):
    pytest.skip("needs equinox")
  raw = lambda numbers: {"bytes_accessed": 1000 // (1 + sum(map(bool, numbers)))}
  label_records = lambda problem, choices, begin: ((choice, raw(choice)) for choice in choices)
  monkeypatch.setattr(Problem, "label_records", label_records)
  monkeypatch.setattr(labels, "create", lambda name, **options: labels.BytesEstimate())
  monkeypatch.chdir(tmp_path)
  first = next(iter(_SECTIONS.values()))[0]
  imports = "".join(re.findall(r"^(?:import|from) .*\n", first, re.M))
  batch = "x, y = jnp.ones((32, 16)), jnp.zeros((32, 8))\n"  # of the section on nnx
  names: dict = {}
  for block in (imports + batch, *_SECTIONS[heading]):
    exec(block, names)  # pylint: disable=exec-used
  (saved,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
  assert any(any(group["orders"]) for group in saved["groups"])
