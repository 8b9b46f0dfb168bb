"""Training: a run from its config to its files.

training     a run: reads data, builds state, step and batches, trains, evaluates, ranks
experiment   the data and the ranker of a config
schema       all sections of a config, and refusals of values that contradict each other;
             `options` refuses values of a wrong type or out of range
step         the training step, which computes the loss, and its state
optimizer    the section `optimizer` of a config
loop         steps, evaluation, early stopping; decides which evaluation is the best
checkpoint   saves the state, keeps two checkpoints, and reads the newest one
evaluation   metrics of scores and labels, and their CSV files
results      `summary.json`, and at the end `validation.csv`, its scores, and `results.csv`
log          `metrics.jsonl`, TensorBoard, progress lines, a profile
"""
