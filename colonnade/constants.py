"""Names that users may extend at run time, and numbers that several parts agree on."""

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
"""Mode name in the config -> name in `DIST_GROUP_INITIALIZER`.

Open: a tensor mode is allowed by being a key here, and by nothing else. Add your own with
`colonnade.constants.INITIALIZER_MAPPING['new_mode'] = 'MyParallelInitializer'`.
"""

STOPPED_IN_ORDER = 75
"""Exit status of a run that was told to stop, finished its step and saved: start it again (EX_TEMPFAIL)."""

SAVED = "COLONNADE_SAVED"
"""Environment variable: the file in which a run notes its newest checkpoint, for the launcher that started it."""

TERMINAL = "COLONNADE_TERMINAL"
"""Environment variable: the width of the terminal on which a launcher shows what rank 0 prints."""

FOLLOWS_AFTER = 3.0
"""Seconds that a rank which failed only because of another one stays under a launcher, so that the other one, which may be slow
to leave, is seen first."""
