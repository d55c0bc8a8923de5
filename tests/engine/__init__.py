"""Tests of `colonnade.engine`."""
