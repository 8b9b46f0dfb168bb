"""From graphs to batches, one batcher per kind of batch.

A batcher prepares graphs once, draws slates of them together with what they take of a
budget, and assembles slates to padded batches:

    prepare(graph) -> prepared graph                    sorted edges, neighbour tables
    draw(graphs, sampler) -> (number, rng) -> Drawn     for `data.pipeline.BatchPlan`
    assemble(slates, budget, graphs=, configs=) -> batch
    align(batches) -> batches                           of several devices: of one structure

Batchers share no base class; `segments` uses the one for layouts.
"""
