"""What the two runs did, side by side: every number against the truth, the tolerance that is derived for it, and the report."""
