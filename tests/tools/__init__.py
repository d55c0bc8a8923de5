"""Tests of what is beside the package: the check of a release, its page, the recording of the demo."""
