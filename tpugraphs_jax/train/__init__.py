"""Training: a run from its config to its files.

training     a run: builds state, step, batches and timetable, trains, evaluates, ranks
loading      loads the graphs of a run, and fits the transforms of its ranker
step         the training step, which computes the loss, and its state
loop         steps, evaluation, early stopping; decides which evaluation is the best
checkpoint   saves the state, keeps two checkpoints, and reads the newest one
evaluation   metrics of scores and labels, and their CSV files
results      `summary.json`, and at the end `validation.csv`, its scores, and `results.csv`
log          `metrics.jsonl`, TensorBoard, progress lines, a profile
"""
