"""Files, remote folders, processes, devices and the console: code that is not about graphs.

  files        atomic writes, locks and checksums
  remote       buckets, copied to and from this machine
  console      lines for the user, and errors in one line
  jobs         many independent jobs, in processes or on a cluster
  parallel     devices and processes of a run
  libtpu       the TPU compiler's library on machines without a TPU
  host_memory  available memory, and the allocator's settings
  trust        validation of files from other people
"""
