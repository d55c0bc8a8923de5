"""Tests of the examples: what they promise, run."""
