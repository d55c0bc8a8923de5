"""Owned slices of parameters, and gathers that run on into the next forward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.comm.groups import GroupMemory
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.gradients.bucket import Bucket, BucketValues, Buffer, GradientShard
from colonnade.gradients.gather import Gather, GatherAhead
from colonnade.gradients.sums import Sharding, Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.transport import LocalTransport
from tests.ranks import on_ranks

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)
KINDS = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def group(size: int, index: int) -> Any:
    return SimpleNamespace(size=size, index=index, sockets=None, alone=size == 1, ranks=tuple(range(size)))


def values(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, ranks: int, index: int, wide: bool = False
) -> BucketValues:
    """The values 1, 2, 3, ... in parameters p0, p1, ..., as rank `index` of `ranks` has them."""
    start, parameters = 1, []
    for shape in shapes:
        numel = torch.empty(shape).numel()
        parameters.append(nn.Parameter(torch.arange(start, start + numel, dtype=torch.float64).view(shape).to(dtype)))
        start += numel
    names = tuple(f"p{at}" for at in range(len(shapes)))
    one = Sum(names, tuple(parameters), tuple(range(ranks)), None, 1.0, sharding=Sharding(wide=wide))
    bucket = Bucket(one, range(len(shapes)), index)
    bucket.buffers.append(Buffer(bucket, GroupMemory(torch.zeros(bucket.numel, dtype=dtype))))
    bucket.shard = GradientShard(torch.zeros(bucket.used, dtype=torch.float32 if wide else dtype))
    bucket.buffers[0].transport = LocalTransport(bucket, bucket.buffers[0].memory, group(ranks, index))
    bucket.use(bucket.buffers[0])
    return BucketValues(bucket, group(ranks, index))


@given(SHAPES, KINDS, st.integers(1, 5))
def test_the_spans_of_all_ranks_make_up_every_parameter_once(shapes, dtype, ranks):
    seen: dict[int, list[int]] = {}
    for index in range(ranks):
        one = values(shapes, dtype, ranks, index)
        bucket = one.bucket
        assert bucket.numel % ranks == 0
        for span, part in zip(bucket.spans, one.parts, strict=True):
            seen.setdefault(span.index, []).extend(range(span.start, span.stop))
            parameter = bucket.parameters[span.index]
            assert torch.equal(part, parameter.detach().flatten()[span.start : span.stop])
            part.fill_(7)
            assert bool((parameter.flatten()[span.start : span.stop] == 7).all()), "a view, not a copy"
        padding = one.memory.own.clone()
        for span in bucket.layout.spans:
            padding[span.start : span.stop] = 0
        assert not padding.any()
        assert one.owned.numel() == bucket.used <= bucket.numel // ranks
    for index, shape in enumerate(shapes):
        assert sorted(seen[index]) == list(range(torch.empty(shape).numel()))


@given(SHAPES, st.integers(1, 4))
def test_a_master_copy_keeps_the_places_and_comes_back_rounded(shapes, ranks):
    one = values(shapes, torch.bfloat16, ranks, 0, wide=True)
    assert one.owned.dtype == torch.float32
    for part in one.parts:
        part.fill_(1.0 + 2**-12)
    one.publish()
    for span, part in zip(one.bucket.spans, one.parts, strict=True):
        assert bool((one.bucket.parameters[span.index].flatten()[span.start : span.stop] == 1.0).all())
        assert bool((part != 1.0).all())


# -- gathers ---
class Reaches(nn.Module):
    """Calls one child, and uses the weight of the other without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.reached = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x), self.reached.weight, self.reached.bias)


@on_ranks(2)
def test_only_parameters_that_their_module_announces_may_be_late():
    """The parameters whose gather may be under way after the first step, and after the second."""
    config = {"zero": {"stage": 1, "gather_ahead": True, "bucket_mb": 0.0001}, "sync": {"shared_memory": False}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = Reaches()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        seen = []
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            seen.append(
                {
                    names[id(parameter)]
                    for gather in engine.optimizer._gathers
                    for one in gather.values
                    if gather.is_under_way(one)
                    for parameter in one.bucket.parameters
                }
            )
        engine.optimizer.wait()
        engine.close()
        first, second = seen[0], seen[1]
    assert first == second == {"called.weight", "called.bias"}


def test_a_bucket_is_held_back_as_long_as_one_of_its_parameters_is_not_announced():
    model, x = Reaches(), torch.ones(2, 8)
    mixed, announced = (
        SimpleNamespace(bucket=SimpleNamespace(parameters=parameters))
        for parameters in ([model.called.weight, model.reached.weight], [model.called.bias])
    )
    waits: list[object] = []
    gather = SimpleNamespace(values=[mixed, announced], wait=lambda values=None: waits.append(values))
    ahead = GatherAhead(model, [gather])
    model(x)
    assert waits == [[mixed], [announced]]  # the module that is called waits for what it has
    waits.clear()
    ahead.hold_back()
    assert waits == [[mixed]]
    model.reached(x)
    waits.clear()
    ahead.hold_back()
    assert waits == [[]]
    waits.clear()
    state = model.state_dict()
    assert waits == [None]
    model.load_state_dict(state)  # else what is under way would come after it
    assert waits == [None, None]
    waits.clear()
    ahead.close()
    model(x)
    model.load_state_dict(model.state_dict())
    assert waits == []


@pytest.mark.parametrize("shared", [False, True])
@on_ranks(2)
def test_slices_reach_all_ranks_through_shared_memory_and_by_collectives(shared: bool):
    """Gradients that all ranks get back, and parameters of which each rank owns a slice."""
    rank, options = dist.get_rank(), SyncOptions(shared_memory=shared, bucket_mb=64 / 2**20)
    for wide in (False, True):
        weights = [nn.Parameter(torch.zeros(20, dtype=torch.bfloat16)) for _ in range(3)]
        sharding = Sharding(wide=wide, give_back=True)
        sum_ = Sum(("a", "b", "c"), tuple(weights), (0, 1), dist.group.WORLD, 2.0, options, sharding)
        reducer = Synchroniser([sum_])
        for _ in range(2):
            reducer.prepare(last=True)
            torch.stack([weight.sum() * (rank + 1) for weight in weights[:2]]).sum().backward()
            reducer.wait()
            found = [None if weight.grad is None else weight.grad.unique().tolist() for weight in weights]
            assert found == [[1.5], [1.5], None]
            for weight in weights:
                weight.grad = None
        (group,) = reducer.groups.values()
        every = [BucketValues(bucket, group) for bucket in reducer.layout]
        dist.barrier()  # as the first backward pass: a rank may write here only when the parameters are in place
        gather = Gather(group, every)
        for at in range(2):
            for one in every:
                one.owned.fill_(rank + 1 + at)
            gather.begin()
            gather.wait(every[:1])
            gather.wait()
            gather.wait()
            for one in every:
                numel, half = one.bucket.layout.numel, one.bucket.numel // 2
                expected = [1.0 + at] * min(half, numel) + [2.0 + at] * (numel - half)
                assert one.memory.own[:numel].tolist() == expected
            dist.barrier()  # as the next backward pass: from then on another rank may write here again
        reducer.close()
