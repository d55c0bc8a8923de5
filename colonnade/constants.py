"""The mapping from mode names in the config to initializers, which users may extend; and constants that several packages share."""

from __future__ import annotations

INITIALIZER_MAPPING: dict[str, str] = {
    "data": "Initializer_Data",
    "model": "Initializer_Model",
    "pipeline": "Initializer_Pipeline",
    "tensor": "Initializer_Tensor",
    "1d": "Initializer_1D",
    "2d": "Initializer_2D",
    "2.5d": "Initializer_2p5D",
    "3d": "Initializer_3D",
    "sequence": "Initializer_Sequence",
    "expert": "Initializer_Expert",
}
"""Mode name in a config -> registered name in `DIST_GROUP_INITIALIZER`.

A tensor mode is valid if it is a key of this dict. Add a custom one with
`colonnade.constants.INITIALIZER_MAPPING['new_mode'] = 'MyParallelInitializer'`.
"""

STOPPED_IN_ORDER = 75
"""Exit status of a run that received a stop signal, finished its step and saved; it can be restarted (EX_TEMPFAIL)."""

SAVED = "COLONNADE_SAVED"
"""Environment variable: the file in which a run notes its newest checkpoint for its launcher."""

TERMINAL = "COLONNADE_TERMINAL"
"""Environment variable: the width of the terminal on which the launcher prints the output of rank 0."""

FOLLOWS_AFTER = 3.0
"""Seconds that a rank waits before it exits after a failure of another rank, so that the launcher notices that rank first."""
