"""Tests of `colonnade.engine.schedule.executor`."""
