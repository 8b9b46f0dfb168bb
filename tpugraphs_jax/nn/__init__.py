"""Layers that several networks share.

layers                  precision, activations, norms, linear layers on nodes, tiles and layouts
embeddings, dropout     embeddings of opcodes, dropout
aggregation, pooling    sums over neighbours, and over the nodes of a graph
conv, attention         convolutions along edges, attention
nodes                   networks that compute only nodes whose state depends on a configuration
"""
