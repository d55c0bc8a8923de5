"""Random streams: the same where they must be, different where they must be, restored to the bit."""

from __future__ import annotations

import pytest
import torch

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.random import RandomStreams
from colonnade.errors import ContextError
from colonnade.testing import run_world


def _draw() -> tuple[dict[str, int], float, float, float]:
    config = {"parallel": {"pipeline": 2, "tensor": 2}, "seed": 7}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        default = torch.rand(()).item()
        with gpc.streams.use(ParallelMode.TENSOR):
            tensor = torch.rand(()).item()
        again = torch.rand(()).item()
        return gpc.layout.coordinates(gpc.get_global_rank()), default, tensor, again


def test_streams_differ_exactly_where_the_data_or_the_part_differs():
    drawn = run_world(8, _draw).values
    for here, default, tensor, again in drawn:
        for there, other_default, other_tensor, other_again in drawn:
            same_but_tensor = here["data"] == there["data"] and here["pipeline"] == there["pipeline"]
            assert (default == other_default) == same_but_tensor
            assert (again == other_again) == same_but_tensor
            assert (tensor == other_tensor) == (here == there)


def test_a_stream_goes_on_where_it_stopped_and_leaves_the_outer_one_alone():
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 3)
    torch.manual_seed(0)
    expected = [torch.rand(()).item() for _ in range(2)]
    torch.manual_seed(0)
    seen = []
    inside = []
    for _ in range(2):
        seen.append(torch.rand(()).item())
        with streams.use(ParallelMode.TENSOR):
            inside.append(torch.rand(()).item())
    assert seen == expected
    assert inside[0] != inside[1]
    torch.manual_seed(3)
    assert inside == [torch.rand(()).item() for _ in range(2)]


def test_an_error_inside_a_stream_restores_the_outer_one():
    streams = RandomStreams()
    streams.add(ParallelMode.TENSOR, 3)
    torch.manual_seed(0)
    expected = torch.rand(()).item()
    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError), streams.use(ParallelMode.TENSOR):
        _ = torch.rand(4).sum() / (1 // 0)
    assert torch.rand(()).item() == expected


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
    with pytest.raises(ContextError, match="streams: TENSOR"), streams.use(ParallelMode.PIPELINE):
        pass
