"""Tests of Colonnade; the tree mirrors the package."""
