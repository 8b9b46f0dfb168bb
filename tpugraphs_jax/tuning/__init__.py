"""JAX functions: their choices of layouts, labels of choices, and the search for the best choice.

programs    functions of Python files
choosing    groups of operations with options, and the function with a choice applied
problem     a function with its choices, their label, and the graph that a model ranks
labels      labels a choice: estimates of a compiler (`hlo.tpu_kernels`), or times (`measure`)
strategies  search: proposes the next choice to label, and learns from labels, with a `prior`
tune        labels what the search proposes, and returns the best choice as `tuned.Tuned`
layouts     the file of a choice, and the function with the choice of a file
estimate    time and memory of a function on TPUs: `compiler` compiles it in another process,
            `costs` says where the time goes, `summary` prints it, `comparison` compares two,
            `variants` many; `estimate_command` is the command of all of them
profile     measured times of a profile beside estimates
page        the page of a result, with `report.templates`; `trace` writes its timeline
tiles       the order of the block sizes of a kernel; `tile_collection` labels those of many kernels
label_file  keeps labels in a file
workers     labels many programs, each in a process (the command `collect`)
"""
