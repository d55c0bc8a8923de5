"""Tests of `colonnade.engine.precision`."""
