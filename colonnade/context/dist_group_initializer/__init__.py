"""Process group initializers: the built-in ones, and the base class for one's own."""

from colonnade.context.dist_group_initializer.axes import (
    Initializer_Data,
    Initializer_Model,
    Initializer_Pipeline,
    Initializer_Sequence,
    Initializer_Tensor,
)
from colonnade.context.dist_group_initializer.base import ProcessGroupInitializer
from colonnade.context.dist_group_initializer.expert import Initializer_Expert
from colonnade.context.dist_group_initializer.tensor import (
    Initializer_1D,
    Initializer_2D,
    Initializer_2p5D,
    Initializer_3D,
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
