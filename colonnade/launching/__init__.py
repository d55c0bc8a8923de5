"""The launcher behind `colonnade run`. Start with `launcher`; `outcome` finds the first failed rank, for `run_world` too."""
