"""Settings of systems, one file each, in the words of their papers and write-ups."""
