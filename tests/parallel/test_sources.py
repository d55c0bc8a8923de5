"""Weights that were one stay one: two parts of one whole, or two parameters in one memory, are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.errors import PlacementError
from colonnade.parallel.placement import check_ties, note_source


def layers(trained: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """Two layers, the weights of which came from one."""
    first, second, whole = nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(4, 2)
    for layer in (first, second):
        note_source(layer.weight, whole)
    second.weight.requires_grad_(trained)
    return first, second


def test_two_parts_of_one_whole_are_refused_if_both_are_trained() -> None:
    first, second = layers()
    for modules in ([nn.ModuleList([first, second])], [first, second]):
        with pytest.raises(PlacementError, match=r"weight' and '.*weight' come from one full parameter"):
            check_ties(modules)
    for order in (layers(trained=False), reversed(layers(trained=False))):
        check_ties(order)
    second.weight = first.weight
    check_ties([nn.ModuleList([first, second])])
    apart = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    check_ties([apart])
    for layer in apart:
        note_source(layer.weight, torch.zeros(4, 2))
    check_ties([apart])


def test_two_parameters_in_one_memory_are_refused_in_one_module() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.data)
    both = nn.ModuleList([first, second])
    with pytest.raises(PlacementError, match=r"'0.weight' and '1.weight' share memory"):
        check_ties([both])
    check_ties([first, second])  # stages of one model
    second.weight.requires_grad_(False)
    check_ties([both])
    check_ties([both.to("meta").requires_grad_()])
    check_ties([nn.ParameterList([torch.zeros(0), torch.zeros(0)])])
