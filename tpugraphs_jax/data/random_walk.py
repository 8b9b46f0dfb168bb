"""How likely a random walk is back where it began: positions of nodes in their graph.

Source: random-walk features of the 3rd place of the "Fast or Slow?" competition, with
its numbers of steps.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse

from tpugraphs_jax.graph import OpGraph

# Steps of walks along edges in both directions, from the second step on, and of walks
# from consumers to producers.
UNDIRECTED_STEPS = 112
DIRECTED_STEPS = 16
# Walks that start from so many nodes are followed at a time.
_NODES_AT_ONCE = 256


def return_probabilities(graph: OpGraph) -> np.ndarray:
  """Random-walk features `[N, 112 + 16]` float32.

  Every node has an edge to itself, and P is the adjacency matrix with rows divided by
  their sums. The first columns are the diagonals of P^2 to P^113 of the undirected
  graph. The others are of the directed graph: the diagonal of P, then for k = 2 to 16
  the column sums of P^k without the diagonal.

  The time grows with N * E: about a second for 3,000 nodes, minutes for 40,000.
  """
  nodes = graph.num_nodes
  directed = scipy.sparse.csr_array(
      (np.ones(graph.num_edges, np.float32), tuple(graph.edge_index.T)), shape=(nodes, nodes))
  directed = ((directed + scipy.sparse.eye_array(nodes)) > 0).astype(np.float32)
  undirected = ((directed + directed.T) > 0).astype(np.float32)
  both = _diagonals(_walk(undirected), UNDIRECTED_STEPS + 1)[:, 1:]
  walk = _walk(directed)
  one_way = _diagonals(walk, DIRECTED_STEPS)
  reached, columns = np.ones(nodes, np.float32), [one_way[:, 0]]
  reached = walk.T @ reached
  for step in range(1, DIRECTED_STEPS):
    reached = walk.T @ reached
    columns.append(reached - one_way[:, step])
  return np.concatenate([both, np.stack(columns, axis=1)], axis=1).astype(np.float32)


def _walk(adjacency: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
  """The matrix with rows divided by their sums, which are above 0."""
  scale = scipy.sparse.diags_array(1 / adjacency.sum(axis=1))
  return (scale @ adjacency).tocsr().astype(np.float32)


def _diagonals(walk: scipy.sparse.csr_array, steps: int) -> np.ndarray:
  """Diagonals of `walk` to the powers 1 to `steps`, `[N, steps]` float32.

  With e the unit vector of a node, the entry of power a + b is (e P^a) (P^b e): each
  direction walks half of the steps.
  """
  nodes = walk.shape[0]
  result = np.zeros((nodes, steps), np.float32)
  transposed = walk.T.tocsr()
  for start in range(0, nodes, _NODES_AT_ONCE):
    stop = min(start + _NODES_AT_ONCE, nodes)
    ahead = np.eye(nodes, stop - start, -start, dtype=np.float32)  # P^b e, a column per node
    back = ahead.copy()
    for step in range(steps):
      if step % 2:
        back = transposed @ back
      else:
        ahead = walk @ ahead
      result[start:stop, step] = np.einsum("nc,nc->c", ahead, back)
  return result
