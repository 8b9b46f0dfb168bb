"""Every variant makes an experiment; what cannot work is refused by the name of its field."""

import itertools

import pytest

from tests.support import parts
from tpugraphs_jax.rankers import model_file
from tpugraphs_jax.rankers.config import Config
from tpugraphs_jax.rankers.ranker import Ranker
from tpugraphs_jax.run import configs
from tpugraphs_jax.train import log

TILE_MODELS = ("EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN", "MLP")
COLLECTIONS = ("xla-random", "xla-default", "nlp-random", "nlp-default")


@pytest.mark.parametrize(
  "kind, variant",
  [
    *(("tile", ",".join(names)) for names in itertools.product(TILE_MODELS, ("", "ci"))),
    *(("layout", ",".join(names)) for names in itertools.product(COLLECTIONS, ("", "official"))),
    *(("layout", f"xla-default,{name}") for name in ("gst", "gst_e", "gst_ed", "gst_efd", "one")),
    ("layout", "nlp-default,tables"),
    ("layout", "full"),
    ("tile", ""),
    *(("tile", ",".join(names)) for names in itertools.product(parts.presets("tile"), ("", "ci"))),
    *(
      ("layout", ",".join(names))
      for names in itertools.product(COLLECTIONS, parts.presets("layout"), ("", "ci"))
    ),
  ],
)
def test_every_variant_makes_a_job(kind, variant, tmp_path):
  config = configs.load(f"{kind}.py:{variant}")
  ranker = Ranker(config)
  if kind == "tile":
    assert ranker.collection.name == "tile:xla"
    name = variant.split(",")[0]
    assert "=" in name or config.model.name == (name or "EarlyJoinSAGE")
  else:
    collection = variant.split(",")[0]
    expected = collection if collection in COLLECTIONS else "xla-random"
    assert ranker.collection.name == f"layout:{expected.replace('-', ':')}"
  # The config in a working folder makes the same model again.
  log.write_manifest(tmp_path, config.to_dict())
  saved = Config.from_dict(model_file.config_of(tmp_path))
  assert saved == config and Ranker(saved).family.network == ranker.family.network


@pytest.mark.parametrize(
  "kind, variant, size, widths",
  [
    *(("tile", name, 10, widths) for name, widths in zip(TILE_MODELS, (64, 64, 32, 32, 32))),
    *(("layout", f"{collection},official", 16, 32) for collection in COLLECTIONS),
  ],
)
def test_official_variants_take_part_and_validate_as_officially(kind, variant, size, widths):
  config = configs.load(f"{kind}.py:{variant}")
  assert config.batch.configs == config.batch.min_configs == size
  assert config.batch.drop_remainder == (kind == "tile")
  assert config.train.valid_sampling == "slates" and config.model.op_embed_dim == widths
  assert kind == "tile" or not config.data.skip_constant


@pytest.mark.parametrize(
  "kind, variant",
  [
    ("tile", "recommended"),
    ("tile", "preset=second_tile"),
    ("tile", "ci"),
    ("layout", "xla-random"),
    ("layout", "xla-random,recommended"),
  ],
)
def test_other_variants_train_on_small_graphs_and_validate_on_a_fixed_sample(kind, variant):
  config = configs.load(f"{kind}.py:{variant}")
  assert config.batch.min_configs == 2 and config.train.valid_sampling == "fixed"


@pytest.mark.parametrize("own", ["own", "own-mine"])
def test_recommended_for_own_programs_is_traffic_tables(own):
  config = configs.load(f"layout.py:{own},recommended")
  assert config == configs.load(f"layout.py:{own},traffic") and config.data.source == "own"
  assert config.model.name == "TrafficTables"
  assert configs.load("layout.py:xla-random,recommended").model.name == "ScoreTables"


@pytest.mark.parametrize(  # bounds: tests/rankers/test_config.py
  "kind, field, value",
  [
    *(
      ("tile", field, value)
      for field, value in (
        ("batch.config_chunk", 3),
        ("data.feature_transform", "shape=nope"),
        ("data.feature_transform", "log_offset(0)"),
        ("loss.losses", "Nope:1"),
        ("loss.losses", "MSE:0"),
        ("loss.margin", float("nan")),
        ("model.name", "Nope"),
        ("optimizer.milestones", (0.9, 0.6)),
        ("profile_steps", "7"),
      )
    ),
    ("layout", "data.search", "nope"),
    ("layout", "data.config_transform", "minmax"),
    ("layout", "model.name", "EarlyJoinSAGE"),
    ("layout", "model.pooling", ()),
  ],
)
def test_impossible_values_are_refused_by_field_in_one_line(kind, field, value):
  with pytest.raises(ValueError) as error:
    parts.make(kind, **{field: value})
  message = str(error.value)
  assert field.rpartition(".")[2] in message and "\n" not in message
  assert str(value).split("=")[-1].strip("(',)") in message


@pytest.mark.parametrize(
  "kind, variant, changes, complaint",
  [
    *(("layout", "", {"loss.losses": f"{name}:1"}, name) for name in ("MAPE", "LogMSE")),
    ("tile", "", {"loss.losses": "ListMLELoss:1,MAPE:1", "batch.target": "rank"}, "MAPE"),
    (
      "tile",
      "",
      {"optimizer.average_window": (0.5, 1.0), "optimizer.average_decay": 0.9},
      "average_window",
    ),
    ("tile", "", {"optimizer.schedule": "multistep"}, "milestones"),
    ("tile", "EarlyJoinResGCN", {"model.reduction": "max"}, "reduction"),
    ("tile", "MLP", {"model.dtype": "bfloat16"}, "dtype"),
    ("layout", "gst_ed,ci", {"data.virtual_node": "output"}, "virtual_node"),
    (
      "layout",
      "gst_ed,ci",
      {"segments.finetune.epochs": 2, "train.valid_sampling": "slates"},
      "valid_sampling",
    ),
    ("layout", "gst_ed,ci", {"segments.recompute": True}, "recompute"),
    (
      "layout",
      "gst_ed,ci",
      {"segments.readout": "scalar", "segments.finetune.epochs": 2},
      "finetune.epochs",
    ),
    ("layout", "preset=first", {"data.features": ("first_layout", "first")}, "first_layout"),
    ("layout", "preset=first", {"data.feature_transform": "standardize"}, "feature_transform"),
    ("layout", "preset=first", {"data.config_transform": "minmax"}, "config_transform"),
    *(
      ("layout", "tables,ci", {field: value}, complaint)
      for field, value, complaint in (
        ("batch.config_chunk", 8, "config_chunk"),
        ("data.config_transform", "minmax", "integers"),
        ("model.pairs", "all", "low_rank"),
        ("model.rank", 0, "rank"),
      )
    ),
    *(
      ("layout", "xla-random,preset=fifth_all", {"data.also": also}, complaint)
      for also, complaint in (
        (("layout:xla:random",), "different layout collections"),
        (("layout:nlp:random",) * 2, "different layout collections"),
        (("tile:xla",), "different layout collections"),
        (("layout:xla",), "unknown collection"),
      )
    ),
    ("layout", "xla-random,preset=gst", {"data.also": ("layout:xla:default",)}, "one collection"),
  ],
)
def test_options_that_exclude_each_other_are_refused(kind, variant, changes, complaint):
  with pytest.raises(ValueError, match=complaint) as error:
    parts.make(kind, variant, **changes)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "variant, changes, complaint",
  [
    ("full,ci", {"trian": 3}, "trian.*did you mean train"),
    ("full,ci", {"train.epoch": 1}, "train.epoch.*did you mean train.epochs"),
    ("full,ci", {"data.tile_padding": True}, "tile_padding"),
    ("tables,ci", {"data.tile_padding": True}, "did you mean model.tile_padding"),
    ("gst_ed,ci", {"segments.finetune.epoch": 1}, "segments.finetune.epochs"),
    ("full,ci", {"segments.keep": 0.5}, "segments"),
    ("full,ci", {"model.hiden_dim": 4}, "hiden_dim"),
    ("full,ci", {"batch.graphs": "4"}, "batch.graphs"),
    ("full,ci", {"batch.graphs": 4.0}, "batch.graphs"),
    ("full,ci", {"train.quick_compile": 1}, "quick_compile"),
    ("full,ci", {"data.features": "released"}, "data.features"),
  ],
)
def test_fields_that_nothing_reads_and_values_of_another_type_are_refused(
  variant, changes, complaint
):
  with pytest.raises(ValueError, match=complaint) as error:
    configs.load(f"layout.py:{variant}").replace(**changes)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "kind, names, complaint",
  [
    ("layout", "official,gst_ed", "official and gst_ed"),
    ("layout", "xla-random,nlp-random", "xla-random and nlp-random"),
    ("tile", "recommended,preset=first", "recommended and preset=first"),
    *((kind, "preset=first,preset=third", "first and preset=third") for kind in ("tile", "layout")),
    *((kind, "preset=eleventh", "eleventh") for kind in ("tile", "layout")),
    ("tile", "ci,nope", "recommended, .*, ci"),
    ("layout", "ci,nope", "full, .*, official, .*, ci"),
    ("tile", "gst_ed", "run_layout"),
    ("layout", "LateJoinSAGE", "run_tile"),
  ],
)
def test_a_config_has_one_collection_and_one_ranker(kind, names, complaint):
  with pytest.raises(ValueError, match=complaint):
    configs.load(f"{kind}.py:{names}")
