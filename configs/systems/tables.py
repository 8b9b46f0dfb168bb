"""Score tables: the network runs once per program, and scores of configurations are looked up.

`recommended` ranks programs that are not in the training data (docs/results.md). It has score
tables for the collections of the data set, and traffic tables for your programs, which are few and
whose choices are output orders for a TPU (docs/records/own_models.md). Expected Kendall tau (mean
over validation graphs) on the synthetic `medium` data for xla-random, xla-default, nlp-random and
nlp-default: 0.88, 0.85, 0.90 and 0.78 in 2 to 3 minutes on one CPU core. Expected tau-b on the test
programs of `data/own`: 0.60 in half a minute.

  python run_layout.py --config=configs/layout.py:xla-random,recommended --workdir=out/best
  python run_layout.py --config=configs/layout.py:own,recommended --data_root=data/own/npz \
      --workdir=out/own
"""

from tpugraphs_jax.rankers.config import (
  BatchOptions,
  Config,
  LayoutDataOptions,
  LossOptions,
  Model,
  Optimizer,
  TrainOptions,
)


def recommended(collection: str) -> Config:
  """For programs outside the training data: ScoreTables, or TrafficTables for `own` collections."""
  return traffic(collection) if collection.startswith("own-") else tables(collection)


def tables(collection: str) -> Config:
  """ScoreTables: costs of choices that a network computes once per program.

  The cost of a step hardly depends on the size of slates, which are large.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection, feature_transform="signed_log1p", pad_value=-1, duplicate_policy="min"
    ),
    batch=BatchOptions(graphs=4, configs=256, slates_per_epoch=400),
    model=Model("ScoreTables"),
    loss=LossOptions("ListMLELoss:1"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=3e-3,
      schedule="cosine",
      warmup_fraction=0.05,
      weight_decay=1e-2,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=10, best_metric="kendaltau"),
  )


def traffic(collection: str) -> Config:
  """TrafficTables: costs from padded bytes, for output orders on a TPU.

  Only single choices have costs, because there are about a hundred programs.
  """
  return Config(
    data=LayoutDataOptions.of(
      collection, feature_transform="signed_log1p", pad_value=-1, duplicate_policy="min"
    ),
    batch=BatchOptions(graphs=32, configs=16, slates_per_epoch=2560),
    model=Model("TrafficTables"),
    loss=LossOptions("CostLogisticLoss:1"),
    optimizer=Optimizer(
      "adamw",
      learning_rate=1e-2,
      schedule="cosine",
      warmup_fraction=0.05,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=5, best_metric="kendaltau"),
  )


def times(collection: str) -> Config:
  """TimeTables: times of nodes, for labels with the times of kernels."""
  return Config(
    data=LayoutDataOptions.of(
      collection,
      features=("released", "orders", "work"),
      feature_transform="orders=none,work=none,*=signed_log1p",
      pad_value=-1,
      duplicate_policy="min",
    ),
    batch=BatchOptions(graphs=16, configs=16, slates_per_epoch=1600, target="absolute"),
    model=Model("TimeTables", dropout=0.3),
    loss=LossOptions("MAPE:1,TimeLogisticLoss:1", kernels=2.0),
    optimizer=Optimizer(
      "adamw",
      learning_rate=3e-3,
      schedule="cosine",
      warmup_fraction=0.05,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    train=TrainOptions(epochs=8, best_metric="kendaltau"),
  )


def times_sage(collection: str) -> Config:
  """TimeSAGE, else as `times`."""
  return times(collection).replace(model=Model("TimeSAGE", dropout=0.3))


LAYOUTS = {
  "recommended": recommended,
  "tables": tables,
  "traffic": traffic,
  "times": times,
  "times_sage": times_sage,
}
