"""One ranker of many options: the competition's systems are settings of it.

  options     the options, and the checks that options fit together
  nodes       batches and node features in two forms, and the operations on both
  inputs      encodings, the first linear layer, tensor dimensions as tokens
  operations  activations, norms, dropout, convolutions
  attention   between nodes, channels and configurations
  encoder     a layer, and the stack of layers
  readouts    configurations that join behind the encoder, readouts, the head
  ranker      the whole
  edges       the 4th place's ranker on edges at configurable nodes, which stands alone

Node features that configurations agree on are stored and computed once (`nn.split_nodes`).
"""
