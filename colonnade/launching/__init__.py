"""How `colonnade run` starts the ranks of a job, shows what they say, and tells how they ended."""
