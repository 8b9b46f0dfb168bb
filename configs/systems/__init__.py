"""Settings of systems, in the words of papers and write-ups: a file for every paper or place."""
