"""The official TensorFlow baseline of TpuGraphs, with its published settings.

docs/parity.md compares the two implementations. Expected top-5 slowdown of kernels (mean over
validation kernels) on the synthetic `medium` data: 0.040 in 3 minutes on one CPU core. Expected
Kendall tau of programs for xla-random, xla-default, nlp-random and nlp-default: 0.20, 0.52, 0.39
and 0.34 in 2 to 4 minutes.

  python run_tile.py --config=configs/tile.py:LateJoinSAGE --workdir=out/late
  python run_layout.py --config=configs/layout.py:nlp-default,official --workdir=out/official
"""

from ml_collections import ConfigDict

from tpugraphs_jax.configs import base


def programs(config: ConfigDict) -> None:
  """ResModel with the published settings."""
  config.data.update(
    feature_transform="minmax",
    config_transform="minmax",
    pad_value=0,
    duplicate_policy="keep",
    skip_constant=False,
  )
  config.batch.update(
    graphs=8,
    configs=16,
    min_configs=16,
    sampling="skewed",
    target="official",
    slates_per_epoch=0,
    drop_remainder=False,
  )
  config.model = base.model("layout", "ResModel")
  config.loss.update(kernel_l2=1e-4, activity_l2=1e-4)
  config.optimizer.update(
    name="adam",
    learning_rate=1e-3,
    clip_norm_per_variable=1e-2,
    clip_norm=0.0,
    schedule="constant",
    warmup_fraction=0.0,
    weight_decay=0.0,
  )
  config.train.update(epochs=50, early_stop_epochs=25, best_metric="opa", valid_sampling="slates")
  config.eval.configs = 500


def kernels(name: str) -> base.Change:
  """The settings of an official model of kernels.

  Args:
    name: registered name, such as `LateJoinSAGE`.
  """

  def settings(config: ConfigDict) -> None:
    config.model = base.model("tile", name)

  settings.__doc__ = f"official {name}, published settings"
  return settings


KERNELS = {
  name: kernels(name)
  for name in ("EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN", "MLP")
}
