"""One outside thing a file, translation only."""
