"""Graph Segment Training, for networks of layouts and of published systems.

family      the options, the step on segments, scores of whole programs
batches     segments that a step computes, and readouts of the others
history     the table of historical readouts
"""
