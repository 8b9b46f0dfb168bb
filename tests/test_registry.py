"""Registries by name, and the modules of users that register in them."""

import pytest

from tests.support import parts
from tpugraphs_jax.config_fields import Registry


def registry_of(*names):
  table = Registry("model.name")
  for name in names:
    table.register(name)(f"entry {name}")
  return table


def test_an_unknown_name_is_an_error_that_lists_all():
  with pytest.raises(ValueError, match="a, b"):
    _ = registry_of("a", "b")["x"]


def test_a_taken_name_is_refused_unless_it_is_the_same_thing():
  table = Registry("model.name")
  table.register("a")(dict)
  table.register("a")(dict)  # as by a module that is loaded again
  with pytest.raises(ValueError, match="already"):
    table.register("a")(list)


@pytest.mark.parametrize(
  "text, reason",
  [
    (None, "No module named 'absent_module'"),
    ("1 / 0", "ZeroDivisionError"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("import no_such_package", "No module named 'no_such_package'"),
    ("def f(:", "SyntaxError"),
  ],
)
def test_a_module_that_cannot_be_imported_is_an_error_in_one_line(
  text, reason, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  name = "absent_module" if text is None else f"broken_{abs(hash(text)) % 10**6}"
  if text is not None:
    (tmp_path / f"{name}.py").write_text(text)
  with pytest.raises(ValueError, match=name) as error:
    parts.make("tile", extensions=(name,))
  assert reason in str(error.value) and "\n" not in str(error.value)
  assert "PYTHONPATH" in str(error.value)
