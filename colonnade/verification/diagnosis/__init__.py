"""Why a run differs from one process: hypotheses, tested on the numbers."""
