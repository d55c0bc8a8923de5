"""Process group initializers: the built-in ones, and the base class for one's own."""

from colonnade.context.dist_group_initializer.base import ProcessGroupInitializer
from colonnade.context.dist_group_initializer.built_in import (
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
