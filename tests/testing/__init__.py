"""Tests of the public test harness."""
