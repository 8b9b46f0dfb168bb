"""Models that come with the package: found by name, small, better than chance."""

import json

import commands
import numpy as np
import pytest

import tpugraphs_jax
from tpugraphs_jax import metrics
from tpugraphs_jax.data import npz
from tpugraphs_jax.serve import shipped

_OWN = commands.ROOT / "data" / "own" / "npz"


def _held_out(ranker):
  """Programs of families that the model was not trained on."""
  folder = _OWN.joinpath(*ranker.collection.name.split(":"))
  return [npz.read_layout(path) for split in ("valid", "test")
          for path in sorted((folder / split).glob("*.npz"))]


def test_two_models_ship():
  assert shipped.names() == ["layout-cpu-measured", "layout-v3-estimate"]


@pytest.mark.parametrize("name", shipped.names())
def test_what_ships_is_small_and_has_a_card_with_label_data_and_figures(name):
  assert shipped.find(name).stat().st_size < 1 << 20
  card = shipped.card(name)
  for word in (f"# {name}", "**Label**", "**Data**", "**test**", "this model", "a random order",
               "the compiler's own choice"):
    assert word in card
  if name.endswith("estimate"):
    assert "no measurement" in card


@pytest.mark.parametrize("name", shipped.names())
def test_what_ships_orders_programs_of_other_families_better_than_chance(name):
  ranker = tpugraphs_jax.load(name)
  graphs = _held_out(ranker)
  found = [metrics.kendall_tau(scores, graph.configs.runtime_ns)
           for graph, scores in zip(graphs, ranker.scores(graphs))]
  assert len(found) >= 5
  assert np.mean(found) > 2 * np.std(found) / np.sqrt(len(found))


def test_a_name_is_a_model_that_ships_unless_something_is_there(tmp_path, monkeypatch):
  monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
  shipped.FOLDER.mkdir()
  (shipped.FOLDER / "a-model.npz").touch()
  (shipped.FOLDER / "a-model.md").write_text("# a-model")
  monkeypatch.chdir(tmp_path)
  assert shipped.names() == ["a-model"] and shipped.card("a-model") == "# a-model"
  assert shipped.find("a-model") == shipped.FOLDER / "a-model.npz"
  for place in ("out/a-model", "./deep/a-model"):
    assert str(shipped.find(place)) == str(shipped.Path(place))
  with pytest.raises(FileNotFoundError, match=r"other is missing: .* that ships \(a-model\)$"):
    shipped.find("other")
  (tmp_path / "a-model").mkdir()  # a folder of the user's
  assert str(shipped.find("a-model")) == "a-model"
  with pytest.raises(ValueError, match="no model 'b' ships, expected one of a-model"):
    shipped.card("b")


def _sidecar(path, **fields):
  path.write_text(json.dumps({"label": "tpu_estimate", "target": "tpu:v3", "jax": "1",
                              "source": "examples/programs/graph_network.py:dense"} | fields))
  return path


def test_a_card_says_what_the_sidecars_agree_on(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(commands.ROOT / "benchmarks"))
  import ship
  paths = [_sidecar(tmp_path / f"{place}.json") for place in range(2)]
  assert ship.facts(paths) == {"label": "tpu_estimate", "target": "tpu:v3", "jax": "1"}
  assert ship.family(paths[0]) == "graph_network"
  _sidecar(paths[0], source="examples/programs/generated_train.py:linear_attention_3")
  assert ship.family(paths[0]) == "linear_attention"
  _sidecar(paths[1], jax="2")
  with pytest.raises(ValueError, match="jax is 2, others have 1; collect them again"):
    ship.facts(paths)


def test_the_figures_of_held_out_families_stand_beside_blind_ones(monkeypatch):
  monkeypatch.syspath_prepend(str(commands.ROOT / "benchmarks"))
  import own_quality
  first, second = (type("Graph", (), {"configs": type("Configs", (), {
      "runtime_ns": np.array(times)})}) for times in ([20, 10, 30], [10, 40, 40]))
  rows = own_quality.blind_rows([first, second])
  assert rows["the compiler's own choice"] == {"slowdown1": 0.5, "slowdown5": 0.5}
  random = rows["a random order"]
  assert random["slowdown1"] == pytest.approx(np.mean([1.0, 2.0]))
  assert random["slowdown5"] == 0  # three are fewer than five
  assert random["found8"] == 1  # of the first alone, whose three are fewer than eight
  rows["a model"] = {"kendaltau": .5, "slowdown1": .25, "slowdown5": 0.,
                     "spread": {"kendaltau": .1, "slowdown1": 0., "slowdown5": 0.}}
  lines = own_quality.table(rows).splitlines()
  assert lines[3] == "| the compiler's own choice | - | - | 0.500 | 0.500 | - |"
  assert lines[4] == "| a model | 0.500 ± 0.100 | - | 0.250 ± 0.000 | 0.000 ± 0.000 | - |"
