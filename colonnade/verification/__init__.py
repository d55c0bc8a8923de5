"""Prove a parallel run equal to one process, and say by name what is wrong with one that is not."""
