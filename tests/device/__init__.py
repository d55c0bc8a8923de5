"""Checks that need an accelerator; run by hand: `python -m tests.device.engine_check`."""
