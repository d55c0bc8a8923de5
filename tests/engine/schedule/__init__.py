"""Tests of `colonnade.engine.schedule`."""
