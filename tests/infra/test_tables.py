"""A table as text and as HTML."""

from tpugraphs_jax.infra.tables import Table


def test_columns_are_as_wide_as_their_cells_and_empty_ones_are_left_out():
  table = Table(["name", "unit", "n"], [["a", "", "10"], ["longer", "", "2"]], "sizes")
  assert str(table).splitlines() == ["sizes", "", "name    n", "a       10", "longer  2"]


def test_html_has_the_same_cells_and_no_tags_of_the_content():
  html = Table(["name", "unit"], [["<script>", ""]], "a & b")._repr_html_()
  assert "&lt;script&gt;" in html and "a &amp; b" in html
  assert "<script" not in html and "unit" not in html


def test_without_rows_only_the_title_is_left():
  assert str(Table(["name"], [], "nothing")) == "nothing"
  assert Table(["name"], [], "nothing")._repr_html_() == "<p>nothing</p>"
