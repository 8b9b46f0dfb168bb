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

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base


def recommended(config: ConfigDict) -> None:
  """For programs outside the training data: ScoreTables, or TrafficTables for `own` collections."""
  tables(config)


def tables(config: ConfigDict) -> None:
  """ScoreTables: costs of choices that a network computes once per program.

  The cost of a step hardly depends on the size of slates, which are large.
  """
  config.batch.update(graphs=4, configs=256, slates_per_epoch=400)
  config.model = base.model("layout", "ScoreTables")
  config.optimizer.weight_decay = 1e-2


def traffic(config: ConfigDict) -> None:
  """TrafficTables: costs from padded bytes, for output orders on a TPU.

  Only single choices have costs, because there are about a hundred programs.
  """
  config.batch.update(graphs=32, configs=16, slates_per_epoch=2560)
  config.model = base.model("layout", "TrafficTables")
  config.loss.losses = "CostLogisticLoss:1"
  config.optimizer.update(learning_rate=1e-2, weight_decay=0.1)
  config.train.epochs = 5


PROGRAMS = {"recommended": recommended, "tables": tables, "traffic": traffic}
