"""The order of the parts of the benchmark on a device, and what stays of an earlier record."""

import device

MACHINE = {"device": "gpu: A", "jax": "1", "date": "2026-01-01"}


def record_of(*, machine=MACHINE, small=False, failures=(), **parts):
  seconds = dict.fromkeys(parts, 1.0)
  failed = {name: "no time was left" for name in failures}
  return {"machine": machine, "small": small, "failures": failed, "seconds": seconds} | parts


def test_parts_that_a_record_lacks_run_first():
  names = list(device.PARTS)
  assert device.in_groups(names, {})[0] == ["parity_tile", "parity_layout", "training"]
  done = {name: {"a": 1} for name in names if name != "tune_attention"}
  earlier = record_of(failures=("parity_layout", "third"), **done)
  groups = device.in_groups(names, earlier)
  assert groups[:4] == [
    ["parity_layout"],
    ["third"],
    ["tune_attention"],
    ["parity_tile", "training"],
  ]
  assert sorted(name for group in groups for name in group) == sorted(names)
  assert device.in_groups(["third", "SAGE"], {}) == [["third"], ["SAGE"]]


def test_figures_that_this_run_has_not_stay():
  earlier = record_of(failures=("third", "gst_ed"), SAGE={"a": 1}, third={}, gst_ed={"b": 1})
  record = record_of(failures=("SAGE", "gst_ed"), third={"c": 2}, SAGE={"a": 2}, gst_ed={"b": 2})
  found = device.with_earlier(record, earlier)
  assert found["SAGE"] == {"a": 1}  # all of them, where this run had a part
  assert (found["third"], found["gst_ed"]) == ({"c": 2}, {"b": 2})
  assert found["failures"] == {"gst_ed": "no time was left"}


def test_figures_of_another_device_or_jax_do_not_stay():
  earlier = record_of(SAGE={"a": 1})
  for other in (MACHINE | {"device": "gpu: B"}, MACHINE | {"jax": "2"}):
    found = device.with_earlier(record_of(machine=other, third={"c": 2}), earlier)
    assert "SAGE" not in found
  assert "SAGE" not in device.with_earlier(record_of(small=True, third={"c": 2}), earlier)
  later = record_of(machine=MACHINE | {"date": "2027-01-01"}, third={"c": 2})
  assert device.with_earlier(later, earlier)["SAGE"] == {"a": 1}
  assert device.with_earlier(record_of(third={"c": 2}), {})["third"] == {"c": 2}
