"""What knows nothing of graphs: files, remote folders, processes, devices and the console.

  files        files that are written whole or not at all, and locks
  remote       buckets, copied to and from this machine
  console      lines for the user, and errors in one line
  jobs         many independent jobs, in processes or on a cluster
  parallel     devices and processes of a run
  libtpu       the compiler of TPUs, on machines without one
  host_memory  how the allocator of the host keeps memory
  trust        what a file of somebody else's may say
"""
