"""Random streams: the same where they must be, different where they must be, restored to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import RandomStreams, derive_seed
from colonnade.errors import ContextError
from colonnade.testing import run_world
from colonnade.utils import checkpoint


def _draw() -> tuple[dict[str, int], tuple[float, ...], float, float]:
    config = {"parallel": {"pipeline": 2, "tensor": 2}, "seed": 7}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        default = torch.rand(()).item(), random.random(), numpy.random.rand()
        with gpc.streams.use(ParallelMode.TENSOR):
            tensor = torch.rand(()).item()
        again = torch.rand(()).item()
        return gpc.layout.coordinates(gpc.get_global_rank()), default, tensor, again


def test_streams_differ_exactly_where_the_data_or_the_part_differs():
    drawn = run_world(8, _draw).values
    for here, default, tensor, again in drawn:
        for there, other_default, other_tensor, other_again in drawn:
            same_but_tensor = here["data"] == there["data"] and here["pipeline"] == there["pipeline"]
            for one, other in zip(default, other_default, strict=True):  # torch, Python, numpy
                assert (one == other) == same_but_tensor
            assert (again == other_again) == same_but_tensor
            assert (tensor == other_tensor) == (here == there)


def test_a_stream_moves_the_outer_one_by_one_number_however_many_are_drawn_inside():
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 3)
    streams.add(ParallelMode.EXPERT, 4)
    outer, inner = [], []
    for mode, count in ((ParallelMode.TENSOR, 1), (ParallelMode.TENSOR, 7), (ParallelMode.EXPERT, 1)):
        torch.manual_seed(0)
        seen = [torch.rand(()).item()]
        for _ in range(2):
            with streams.use(mode):
                inner.append(torch.rand(count)[0].item())
            seen.append(torch.rand(()).item())
        outer.append(seen)
    assert outer[0] == outer[1] == outer[2]
    assert inner[:2] == inner[2:4]  # of the mode's seed and of the place in the outer stream
    assert len({*outer[0], *inner}) == 7


def test_an_error_inside_a_stream_restores_the_outer_one():
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 3)
    torch.manual_seed(0)
    _drawn_inside(streams)
    expected = torch.rand(()).item()
    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError), streams.use(ParallelMode.TENSOR):
        _ = torch.rand(4).sum() / (1 // 0)
    assert torch.rand(()).item() == expected


# -- computed again ---------------------------------------------------------------------------------------


def _run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


AGAIN: dict[str, Callable[..., Any]] = {
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "ours": lambda function, x: checkpoint(function, False, x),
    "ours, reentrant": lambda function, x: checkpoint(function, False, x, use_reentrant=True),
    "ours, offloaded": lambda function, x: checkpoint(function, True, x),
    "ours, offloaded, reentrant": lambda function, x: checkpoint(function, True, x, use_reentrant=True),
}


def _gradient(run: Callable[..., Any], seed: int, device: str) -> Tensor:
    """Of three blocks that draw from streams and from none; the second one begins inside a stream."""
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 3)
    streams.add(ParallelMode.EXPERT, 4)
    torch.manual_seed(seed)
    layer = nn.Linear(8, 8, device=device)

    def block(x: Tensor) -> Tensor:
        with streams.use(ParallelMode.TENSOR):
            x = F.dropout(layer(x))
            with streams.use(ParallelMode.EXPERT):
                x = F.dropout(x, 0.1)
        return F.dropout(x, 0.1)

    x = run(block, torch.randn(4, 8, device=device, requires_grad=True))
    with streams.use(ParallelMode.TENSOR):
        x = run(block, x)
    run(block, x).square().sum().backward()
    return layer.weight.grad


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", AGAIN)
def test_a_stream_gives_the_same_numbers_when_activations_are_computed_again(way, device):
    for seed in range(10):
        expected = _gradient(_run, seed, device)
        assert torch.equal(_gradient(AGAIN[way], seed, device), expected), seed


def _drawn_inside(streams: RandomStreams) -> torch.Tensor:
    with streams.use(ParallelMode.TENSOR):
        return torch.rand(3)


def test_streams_are_saved_and_restored_to_the_bit():
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 3)
    _drawn_inside(streams)
    saved = streams.state_dict()
    first = (torch.rand(3), _drawn_inside(streams))
    other = RandomStreams()
    other.load_state_dict(saved)
    again = (torch.rand(3), _drawn_inside(other))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_a_stream_that_is_not_there_or_there_twice_is_an_error():
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 1)
    with pytest.raises(ContextError, match="already has a random stream"):
        streams.add(ParallelMode.TENSOR, 2)
    streams.add(ParallelMode.TENSOR, 2, overwrite=True)
    assert streams.state_dict()["seeds"] == {"tensor": 2}
    with pytest.raises(ContextError, match="Streams exist for TENSOR"), streams.use(ParallelMode.PIPELINE):
        pass


def test_a_derived_seed_is_the_same_in_every_version():
    """Else a run that is resumed with another version would draw other numbers."""
    assert derive_seed(1024, "a", 3) == 8238176227400276808
    assert derive_seed(0) == 3456079177858693020
    found = {derive_seed(1, part) for part in range(100)}
    assert len(found) == 100
    assert 2**62 < max(found) < 2**63
