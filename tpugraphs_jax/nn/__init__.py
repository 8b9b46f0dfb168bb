"""Layers that several networks share.

layers, norms, dropout  dense layers and embeddings as in Keras, norms, dropout
linear                  linear layers as in PyTorch; first layers that read nodes, tiles and layouts
aggregation, pooling    sums over neighbours, and over the nodes of a graph
conv, attention         convolutions along edges, attention
nodes                   networks that compute only nodes whose state depends on a configuration
"""
