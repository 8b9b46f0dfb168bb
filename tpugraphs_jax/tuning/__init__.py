"""Programs of one's own: their layout choices, labels for them, and the search for the best one.

programs   functions of Python files
choosing   the groups of operations whose layouts can be chosen, and the function with a choice
problem    a function with its choices, their label, and the graph that a model ranks
labels     estimates of a compiler (`tpu`, `tpu_kernels`), or times (`measure`)
estimate   what a function costs on TPUs, with times of measured programs in `times.json`
tune       the search for one function: `strategies`, with a `prior`; `layouts` are its result
collect    labels of many programs: `workers` start a `worker` for each, which keeps a `journal`
"""
