"""The parser of HLO text, a process of its own."""

import pytest

from tpugraphs_jax.hlo import proto, text

_TEXT = b"""HloModule m

ENTRY e {
  a = f32[4]{0} parameter(0)
  ROOT c = f32[4]{0} custom-call(a), custom_call_target="V", api_version=API_VERSION_UNSPECIFIED
}
"""


def test_a_version_that_the_parser_does_not_know_is_left_out(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONWARNINGS", "error")
  (tmp_path / "numpy.py").write_text("raise ImportError('of the working folder')")
  module = proto.HloModuleProto.FromString(text.module_of(_TEXT, "x"))
  assert [node.opcode for node in proto.instructions(module)] == ["parameter", "custom-call"]


def test_a_refusal_is_the_message_of_xla_alone():
  with pytest.raises(ValueError, match=r"^x: jax cannot read this HLO text \(INVALID.*paramete"):
    text.module_of(_TEXT.replace(b"parameter", b"paramete"), "x")


def test_several_modules_are_counted():
  with pytest.raises(ValueError, match=r"^x has 2 HLO modules.* each to a file"):
    text.module_of(2 * _TEXT, "x")


def test_the_check_that_ended_the_parser_is_told():
  with pytest.raises(ValueError, match=r"ended jax's parser \(Check failed: param_no"):
    text.module_of(_TEXT.replace(b"parameter(0)", b"parameter(5)"), "x")
