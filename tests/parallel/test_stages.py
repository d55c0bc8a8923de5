"""The stages of one rank: names and state of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.parallel.split import split
from colonnade.parallel.stages import Chunks, take_stages


def two_of_four() -> tuple[nn.Sequential, Chunks]:
    """A model, and the stages of the first of two ranks, stages going round."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    chunks = take_stages(split(model, num_stages=4), [0, 1, 0, 1], 0)
    assert isinstance(chunks, Chunks)
    return model, chunks


def test_the_names_are_those_of_the_whole_model() -> None:
    _, chunks = two_of_four()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(chunks.state_dict()) == [name for name, _ in chunks.named_parameters()] == names
    assert chunks.get_submodule("2") is dict(chunks.named_modules())["2"]
    assert chunks.get_submodule("") is chunks
    with pytest.raises(AttributeError):
        chunks.get_submodule("3")


def test_loading_tells_what_is_missing_and_unexpected_in_all_stages() -> None:
    model, chunks = two_of_four()
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    for name in ("0.bias", "2.weight"):
        del state[name]
    found = chunks.load_state_dict(state, strict=False)
    assert found.missing_keys == ["0.bias", "2.weight"]
    assert found.unexpected_keys == ["1.bias", "1.weight", "3.bias", "3.weight"]
    assert chunks.state_dict()["0.weight"].eq(1).all()
    with pytest.raises(RuntimeError, match=r"unexpected keys for the stages here: 1\.bias"):
        chunks.load_state_dict(state)
