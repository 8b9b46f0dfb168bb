"""One ranker of many options: the competition's systems are settings of it.

  options       what there is to choose, and which choices exclude each other
  nodes         node features in their two forms, and the operations on both
  encodings     opcodes and layout integers as numbers; `dimensions`: tensor dimensions as tokens
  inputs        the first linear layer, where node features meet the configuration
  convolutions, norms, attention, layers    what a layer is made of
  drop_edge     edges left out at random in training
  joins         configurations that meet nodes, or the graph, after the encoder
  readouts      node features to one readout per graph and configuration
  ranker        the whole
  edges         the 4th place's ranker on edges at configurable nodes, which stands alone

Every module works on both forms of node features: stored once where configurations agree,
and plain `[N, C, F]`. The option `share` chooses; scores and gradients are the same.
"""

from tpugraphs_jax.rankers.composed import edges, ranker
