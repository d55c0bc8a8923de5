"""The two runs that are compared: what the ranks do is noted, and one process does the same on their joined batches."""
