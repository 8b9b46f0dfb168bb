"""Score tables: the score of a configuration is a sum over its nodes and pairs of nodes.

network, traffic         the networks that compute costs
node_pairs, terms        which pairs of nodes and of groups have a cost
batches                  padded arrays of programs
family                   scores, explanations and proposals
charges, search          the costs of one configuration, the cheapest configurations
"""
