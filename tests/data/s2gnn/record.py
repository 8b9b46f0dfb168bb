"""Records scores of the public S2GNN on a random program with random weights.

Run it in an environment with torch, torch_geometric 2.3.1, yacs and scipy, for a checkout of
sigeisler/s2gnn whose `__init__.py` files are empty, so that only the files of the network load:

    PYTHONPATH=s2gnn python tests/data/s2gnn/record.py

One line of the checkout must be corrected: `FeatureBatchSpectralLayer` reshapes its result to
`x_shape[0], y_hat.shape[-1]`, without the configurations; it is `*x_shape[:-1], y_hat.shape[-1]`
here. In later versions of torch_geometric `GeneralMultiLayer` mixes up two widths.
"""

from pathlib import Path
import sys
import types

import numpy as np
import scipy.sparse.linalg
import scipy.special  # noqa: F401
import torch
from torch_geometric.data import Data
from torch_geometric.graphgym.config import cfg, set_cfg
import yaml

for name in ("torch_sparse", "torch_scatter"):  # imported by other layers
  sys.modules[name] = types.SimpleNamespace(
    **dict.fromkeys(("SparseTensor", "coalesce", "set_diag", "matmul", "scatter"))
  )
from graphgps.config import custom_gnn_config, dataset_config, posenc_config  # noqa: F401
from graphgps.encoder import tpu_encoder  # noqa: F401

SETTINGS = "configs/tpugraphs/tpugraphs-s2gnn-layout-mix-10000.yaml"
NODES, CONFIGS, WIDTH = 120, 3, 8


def configure(checkout: Path) -> None:
  """The published settings with narrow layers, without features of edges."""
  set_cfg(cfg)
  published = yaml.safe_load((checkout / SETTINGS).read_text())
  for section in ("gnn", "dataset", "posenc_MagLapPE"):
    change(getattr(cfg, section), published[section])
  cfg.gnn.dim_inner = cfg.share.dim_in = WIDTH
  cfg.gnn.use_edge_attr = False
  cfg.gnn.spectral.frequency_cutoff = 2.5  # beyond all eigenvalues


def change(node, values):
  for name, value in values.items():
    if isinstance(value, dict):
      change(getattr(node, name), value)
    else:
      setattr(node, name, value)


def program(rng: np.random.Generator) -> Data:
  """A connected program; some edges occur twice."""
  edges = [(i, rng.integers(max(0, i - 6), i)) for i in range(1, NODES)]
  edges += [(i, rng.integers(0, i)) for i in range(3, NODES, 4)] + edges[:5]
  node = rng.choice(NODES, 12, replace=False)
  config = torch.tensor(rng.integers(-1, 6, (12, CONFIGS, 18)), dtype=torch.float32)
  everywhere = torch.zeros(NODES, CONFIGS, 18)
  everywhere[node] = config
  return Data(
    num_nodes=NODES,
    edge_index=torch.tensor(np.array(edges).T),
    op_feats=torch.tensor(rng.normal(size=(NODES, 123)), dtype=torch.float32),
    op_code=torch.tensor(rng.integers(1, 120, NODES)),
    config_idx=torch.tensor(node),
    config_feats=config,
    config_feats_full=everywhere,
    y=torch.zeros(1, CONFIGS),
  )


def main() -> None:
  import graphgps
  from graphgps.network.s2gnn import S2GNN
  from graphgps.transform.precalc_eigvec import AddMagneticLaplacianEigenvectorPlain

  configure(Path(graphgps.__path__[0]).parent)
  torch.manual_seed(0)
  AddMagneticLaplacianEigenvectorPlain.__abstractmethods__ = frozenset()
  settings = cfg.posenc_MagLapPE
  eigenvectors = AddMagneticLaplacianEigenvectorPlain(
    k=settings.max_freqs,
    q=settings.q,
    which=settings.which,
    normalization=settings.laplacian_norm,
    positional_encoding=settings.positional_encoding,
    drop_trailing_repeated=settings.drop_trailing_repeated,
    scc=settings.largest_connected_component,
  )
  batch = eigenvectors(program(np.random.default_rng(0)))
  network = S2GNN(WIDTH, 1).eval()
  with torch.no_grad():
    for weight in network.parameters():
      if weight.requires_grad:
        weight.add_(0.2 * torch.randn_like(weight))
    arrays = {
      "edge_index": batch.edge_index.T,
      "features": batch.op_feats,
      "opcode": batch.op_code,
      "config_node": batch.config_idx,
      "config": batch.config_feats,
      "values": batch.laplacian_eigenvalue_plain[0],
      "bound": batch.laplacian_eigenvalue_plain_bounds,
      "vectors": batch.laplacian_eigenvector_plain,
      "positions": batch.laplacian_eigenvector_plain_posenc,
    }
    arrays = {name: array.clone().numpy() for name, array in arrays.items()}
    weights = {
      f"weights/{name}": parameter.numpy() for name, parameter in network.named_parameters()
    }
    scores = network(batch)[0].reshape(-1).numpy()
  np.savez_compressed(Path(__file__).with_suffix(".npz"), **arrays, **weights, scores=scores)


if __name__ == "__main__":
  main()
