"""The start from the meta device over NCCL: under every layout the weights of the whole model, drawn on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.meta import meta_init, parameter_inits
from tests.device.check import Check
from tests.engine.test_materialise import MODELS, ON_EIGHT, ON_FOUR, Case, compare

SEED = 1024
"""That of `launch` where none is given."""


def checks() -> Iterator[Check]:
    yield Check("meta", "starts as one process", 4, starts_alike, (ON_FOUR,), places_itself=True)
    yield Check("meta", "starts as one process", 8, starts_alike, (ON_EIGHT,), places_itself=True)


def starts_alike(cases: list[Case]) -> None:
    compare(cases, {name: drawn(name) for name in dict.fromkeys(name for name, *_ in cases)})


def drawn(name: str) -> dict[str, Tensor]:
    """The parameters of the whole model, made here: on the CPU a normal number may have another last bit."""
    with meta_init():
        model = MODELS[name](context=ParallelContext())
    inits, values = parameter_inits([model]), {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inits:
            start = [0] * parameter.dim()
            values[key] = torch.empty(parameter.shape, device="cuda" if torch.cuda.is_available() else "cpu")
            inits[id(parameter)].fill(values[key], start, parameter.shape, start, SEED)
    return values
