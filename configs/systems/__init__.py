"""Settings of systems, one file each, in the terms of their papers and write-ups."""
