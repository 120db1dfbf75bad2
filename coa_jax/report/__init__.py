"""Reports of runs for people."""
