"""Copies the variables of a SavedModel and writes the arrays that TensorFlow reads from them.

Run it in an environment with tensorflow 2.15, tensorflow_gnn, tensorflow_ranking and the official
code, whose trainer makes the model (here on synthetic kernels):

    python -m tpugraphs_jax.synthetic --out=synthetic --collections=tile:xla --limit=3
    python tiles_train.py --model=LateJoinResGCN --data_root=synthetic/npz/tile/xla --out_dir=out \
        --epochs=2 --batch=1 --configs=10 --model_kwargs_json='{"hidden_dim": 2, "op_embed_dim": 1}'
    python tests/data/saved_model/record.py out/model_HASH
"""

from pathlib import Path
import shutil
import sys

import numpy as np
import tensorflow as tf
import tensorflow_gnn  # noqa: F401  (layers of the model)
import tensorflow_ranking  # noqa: F401
from tpu_graphs.baselines.tiles import metrics

HERE = Path(__file__).parent

if __name__ == "__main__":
  folder = Path(sys.argv[1])
  with tf.keras.saving.custom_object_scope({"CombinedLoss": metrics.CombinedLoss}):
    model = tf.keras.models.load_model(folder)
  shutil.copytree(folder / "variables", HERE / "variables", dirs_exist_ok=True)
  np.savez(HERE / "weights.npz", *[variable.numpy() for variable in model.trainable_variables])
