"""Figures of benchmarks, as pages show them."""

import gst_quality
import pages


def test_a_figure_of_one_seed_has_no_spread():
  run = {"kendaltau": 0.5, "opa": 0.75, "seconds": 3.0, "peak_mib": 100.0}
  one, two = (gst_quality.table({"gst_ed": pages.summary(runs)})
              for runs in ([run], [run, run | {"kendaltau": 0.7}]))
  assert "0.500 |" in one and "nan" not in one
  assert "0.600 ± 0.141" in two
