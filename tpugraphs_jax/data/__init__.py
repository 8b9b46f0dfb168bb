"""Data: from released files to padded batches.

npz, graph_folder, store      files of graphs, and the store with random access
download                      fetches the released collections
selection, folds              graphs and configurations of a run, and its splits
reduction, factoring          smaller graphs, and configurations without repeated rows
features, transforms          features of a graph, and their fitted transforms
plan                          the slates of each step
batching                      padded arrays: `TileBatch.config_feat` holds the tiles of kernels
"""
