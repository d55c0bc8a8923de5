"""The ancestor's name for `colonnade.context.dist_group_initializer`; the same classes."""

from colonnade.context.dist_group_initializer import (
    Initializer_1D,
    Initializer_2D,
    Initializer_2p5D,
    Initializer_3D,
    Initializer_Data,
    Initializer_Expert,
    Initializer_Model,
    Initializer_Pipeline,
    Initializer_Sequence,
    Initializer_Tensor,
    ProcessGroupInitializer,
)

__all__ = [
    "Initializer_1D",
    "Initializer_2D",
    "Initializer_2p5D",
    "Initializer_3D",
    "Initializer_Data",
    "Initializer_Expert",
    "Initializer_Model",
    "Initializer_Pipeline",
    "Initializer_Sequence",
    "Initializer_Tensor",
    "ProcessGroupInitializer",
]
