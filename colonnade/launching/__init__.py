"""`colonnade run`: read `launcher` first. `outcome` decides which rank failed first, for `run_world` too."""
