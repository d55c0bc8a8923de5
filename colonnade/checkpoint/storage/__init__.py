"""The folder of a run: its lock, its checkpoints, writing a new one, and verifying one that is there."""
