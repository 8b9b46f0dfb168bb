"""Graph Segment Training (arXiv 2305.12322, kaidic/GST), and the 7th place.

Expected: see docs/records/race.md. The published runs took 20,000 passes over the
programs on a GPU; here a run is as long as configs/layout.py says.

  python run_layout.py --config=configs/layout.py:xla-random,preset=gst --workdir=out/gst
  python run_layout.py --config=configs/layout.py:xla-random,preset=seventh --workdir=out/seventh
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base

SMALL = dict(op_embed_dim=8, map_width=8, width=8, rounds=2)  # variant `ci`


def gst(config: ConfigDict) -> None:
  """Graph Segment Training of TpuGraphs (arXiv 2305.12322, public code).

  32 programs with 32 configurations each, drawn with replacement; ranges of at most 1,000 nodes
  as segments, one of them with gradients; the stale score of another segment is kept with
  probability 0.5 for each configuration; hinges with margin 0.1, summed over the pairs of a
  slate; Adam with weight decay in the gradient. Validation is on 32 configurations.

  Stale scores go to their own configurations. In the public code they do where a program has two
  segments; with more it hands them to other configurations, and of several programs in a batch
  it reads and writes the rows of the last one's configurations.
  """
  config.data.update(
      feature_transform="gst", config_transform="none", fit_splits=("train", "valid", "test"))
  config.batch.update(graphs=32, configs=32, sampling="uniform_replacement")
  config.model = base.model("layout", "GST")
  config.loss.losses = "SumHingeLoss:1"
  config.optimizer.update(
      name="adam_l2", learning_rate=1e-4, schedule="cosine", weight_decay=5e-4)
  config.train.valid_configs = 32
  base.in_segments(
      config, partition="published", max_nodes=1000, fresh=1, keep=0.5, keep_unit="entry",
      readout="scalar", aggregation="sum")


def seventh(config: ConfigDict) -> None:
  """7th place: Graph Segment Training with an activation between its rounds.

  Published: that it began with the code of Graph Segment Training, samples segments to save
  memory, and has models of its own by edge and by the shape of nodes; tiles are ranked by the
  official model, the default of `configs/tile.py`. There is no code. Here it is `gst` with an
  activation behind each round; models by edge and by shape are missing.
  """
  gst(config)
  config.model.activate_rounds = True


LAYOUTS = {"gst": gst, "seventh": seventh}
TILES = {}
