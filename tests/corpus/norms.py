"""Norms as the field has taken them: which parameters of a rank count, and over which ranks the squares are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from colonnade import ParallelMode
from tests.corpus.runner import is_split, squares

Chosen = Callable[[str, Tensor], bool]


def everything(name: str, parameter: Tensor) -> bool:
    return True


def taken_over(
    mode: ParallelMode | None, summed: Chosen, own: Chosen = lambda name, parameter: False
) -> Callable[[Any], Tensor]:
    """The norm of what `summed` chooses, its squares summed over `mode` (None: of this rank alone), and what `own` chooses."""

    def norm(engine: Any) -> Tensor:
        total = squares(engine, summed)
        if mode is not None:
            dist.all_reduce(total, group=engine.context.get_group(mode))
        return (total + squares(engine, own)).sqrt()

    return norm


def split(name: str, parameter: Tensor) -> bool:
    return is_split(parameter)


def whole(name: str, parameter: Tensor) -> bool:
    return not is_split(parameter)
