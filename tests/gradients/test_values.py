"""Owned slices of parameters: pure arithmetic, over any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.comm.groups import GroupMemory
from colonnade.gradients.bucket import Bucket, BucketValues, Buffer, GradientShard
from colonnade.gradients.sums import Sharding, Sum
from colonnade.gradients.transport import LocalTransport

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


def test_weights_that_were_written_by_hand_reach_the_masters():
    one = values([(40,)], torch.bfloat16, 2, 1, wide=True)
    ((part,), (parameter,)) = one.parts, one.bucket.parameters
    before = part.clone()
    part += 2**-12
    one.publish()
    one.refresh()
    assert not torch.equal(part, before), "masters that nobody wrote to keep their digits"
    with torch.no_grad():
        parameter.add_(1)
    one.refresh()
    assert torch.equal(part, before + 1)
    parameter.data.copy_(parameter.data + 2)  # a write that the parameter's own version counter does not see
    one.refresh()
    assert torch.equal(part, before + 3)
    parameter.data = parameter.data + 1  # other memory
    one.refresh()
    assert torch.equal(part, before + 4)
    part.fill_(0.5)
    one.publish()
    mine = one.bucket.spans[0]
    assert bool((parameter[mine.start : mine.stop] == 0.5).all()), "the parameter has the bucket's memory again"


def test_a_sum_that_is_not_sharded_is_owned_by_every_rank():
    whole = replace(values([(5,), (3, 2)], torch.float32, 2, 1).bucket.sum, sharding=None)
    assert [(span.index, span.start, span.stop) for span in Bucket(whole, [0, 1], 1).spans] == [(0, 0, 5), (1, 0, 6)]
