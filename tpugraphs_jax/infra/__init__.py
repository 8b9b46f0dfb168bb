"""Files, remote folders, processes, devices and the console: code that is not about graphs.

files      atomic writes, locks and checksums; buckets, copied to and from this machine
console    lines for the user, and errors in one line
tasks      many independent tasks, in processes or on a cluster; stopping without losing work
parallel   devices and processes of a run
machine    which process writes, memory, the allocator's settings, signs of a TPU
tables     a table as text on a terminal and as HTML in a notebook
trust      validation of files from other people
"""
