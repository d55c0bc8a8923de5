"""Tests of `colonnade.engine.schedule.transfer`."""
