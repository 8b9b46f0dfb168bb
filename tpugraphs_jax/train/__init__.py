"""Training: a run from its config to its files.

training     a run: reads data, builds state, step and batches, trains, evaluates, ranks
experiment   the data and the ranker of a config
schema       all sections of a config, and refusals of values that contradict each other
step         the training step, which computes the loss, and its state
optimizer    the section `optimizer` of a config
loop         steps, evaluation, early stopping; the metric that chooses the checkpoint
checkpoint   saves, keeps the newest and the best checkpoint, and reads them
evaluation   metrics of scores and labels, and their CSV files
results      `summary.json`, the evaluation and the ranking that a run writes at its end
log          `metrics.jsonl`, TensorBoard, progress lines, a profile
"""
