"""Every collective on real ranks: what it gives, its gradient, and the gradient's gradient, against plain sums and joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.parallel import collectives, wire
from colonnade.parallel.wire import Members
from colonnade.proof.planner.ranks import fake_rank
from colonnade.testing import run_world
from tests.ranks import on_ranks

MODE = ParallelMode.PARALLEL_1D
Ranks = list[Tensor]
Formula = Callable[[Ranks, int], Tensor]


@dataclass
class Contract:
    """`call` on rank `at` with the inputs of all ranks gives `forward`; with the gradients of all, `backward`."""

    call: Callable[[Tensor, ParallelContext], Tensor]
    shapes: list[tuple[int, ...]]
    forward: Formula
    backward: Formula


def _parts(sizes: list[int], dim: int) -> Formula:
    return lambda tensors, at: sum(tensors).split(sizes, dim)[at]


def _own(sizes: list[int], dim: int) -> Formula:
    return lambda tensors, at: tensors[at].split(sizes, dim)[at]


def _joined(dim: int) -> Formula:
    return lambda tensors, at: torch.cat(tensors, dim)


def _whole(tensors: Ranks, at: int) -> Tensor:
    return sum(tensors)


def _contracts(n: int) -> dict[str, Contract]:
    same = [(2, 3, 4)] * n
    uneven, even = [3, 1, 0, 2][:n], [2] * n
    found = {
        "copy": Contract(lambda x, gpc: collectives.copy(x, MODE, context=gpc), same, lambda t, at: t[at], _whole),
        "reduce": Contract(lambda x, gpc: collectives.reduce(x, MODE, context=gpc), same, _whole, lambda t, at: t[at]),
    }
    for dim in (0, 1, -1):
        for sizes in (uneven, even):
            found.update(_splitting(dim, sizes))
    found.update(_moving(n))
    return found


def _splitting(dim: int, sizes: list[int]) -> dict[str, Contract]:
    """gather and scatter, all_gather and reduce_scatter; the lengths said or found out."""

    def shape(length: int) -> tuple[int, ...]:
        whole = [2, 3, 4]
        whole[dim] = length
        return tuple(whole)

    parts, wholes = [shape(size) for size in sizes], [shape(sum(sizes))] * len(sizes)
    name = f"on {dim}, {sizes}"
    said = {"sizes": sizes}
    return {
        f"gather {name}": Contract(
            lambda x, gpc: collectives.gather(x, MODE, dim, **said, context=gpc), parts, _joined(dim), _own(sizes, dim)
        ),
        f"gather asking {name}": Contract(
            lambda x, gpc: collectives.gather(x, MODE, dim, context=gpc), parts, _joined(dim), _own(sizes, dim)
        ),
        f"scatter {name}": Contract(
            lambda x, gpc: collectives.scatter(x, MODE, dim, **said, context=gpc),
            wholes,
            _own(sizes, dim),
            _joined(dim),
        ),
        f"all_gather {name}": Contract(
            lambda x, gpc: collectives.all_gather(x, MODE, dim, context=gpc), parts, _joined(dim), _parts(sizes, dim)
        ),
        f"reduce_scatter {name}": Contract(
            lambda x, gpc: collectives.reduce_scatter(x, MODE, dim, **said, context=gpc),
            wholes,
            _parts(sizes, dim),
            _joined(dim),
        ),
    }


def _moving(n: int) -> dict[str, Contract]:
    table = [[(origin + 2 * target) % 3 for target in range(n)] for origin in range(n)]  # rows from origin to target
    back = [list(column) for column in zip(*table, strict=True)]

    def exchanged(table: list[list[int]]) -> Formula:
        return lambda tensors, at: torch.cat([t.split(table[origin])[at] for origin, t in enumerate(tensors)])

    even = [[2] * n] * n
    return {
        "all_to_all": Contract(
            lambda x, gpc: collectives.all_to_all(x, MODE, context=gpc),
            [(2 * n, 3)] * n,
            exchanged(even),
            exchanged(even),
        ),
        "all_to_all uneven": Contract(
            lambda x, gpc: collectives.all_to_all(
                x, MODE, table[gpc.get_local_rank(MODE)], back[gpc.get_local_rank(MODE)], context=gpc
            ),
            [(sum(row), 3) for row in table],
            exchanged(table),
            exchanged(back),
        ),
        "all_to_all asking": Contract(
            lambda x, gpc: collectives.all_to_all(x, MODE, table[gpc.get_local_rank(MODE)], context=gpc),
            [(sum(row), 3) for row in table],
            exchanged(table),
            exchanged(back),
        ),
        "ring": Contract(
            lambda x, gpc: collectives.ring(x, MODE, context=gpc),
            [(2, 3)] * n,
            lambda t, at: t[(at - 1) % n],
            lambda t, at: t[(at + 1) % n],
        ),
        "ring back, uneven": Contract(
            lambda x, gpc: collectives.ring(x, MODE, -1, ((gpc.get_local_rank(MODE) + 1) % n + 1, 3), context=gpc),
            [(at + 1, 3) for at in range(n)],
            lambda t, at: t[(at + 1) % n],
            lambda t, at: t[(at - 1) % n],
        ),
        "ring all round": Contract(
            lambda x, gpc: collectives.ring(x, MODE, n, context=gpc),
            [(2, 3)] * n,
            lambda t, at: t[at],
            lambda t, at: t[at],
        ),
    }


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Not contiguous: a collective that forgets about strides gets it wrong."""
    drawn = torch.randn(*reversed(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.permute(*reversed(range(len(shape))))


def _check(name: str, contract: Contract, gpc: ParallelContext) -> None:
    n, at = gpc.tensor_parallel_size, gpc.get_local_rank(MODE)
    xs = [_numbers(shape, rank) for rank, shape in enumerate(contract.shapes)]
    hs = [_numbers(shape, 200 + rank) for rank, shape in enumerate(contract.shapes)]
    gs = [_numbers(tuple(contract.forward(xs, rank).shape), 100 + rank) for rank in range(n)]
    x, g = xs[at].clone().requires_grad_(), gs[at].clone().requires_grad_()
    y = contract.call(x, gpc)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx, g, hs[at])
    for what, found, wanted in (
        ("forward", y, contract.forward(xs, at)),
        ("backward", dx, contract.backward(gs, at)),
        ("twice", dg, contract.forward(hs, at)),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13, msg=lambda m: f"{name}, {what}: {m}")  # noqa: B023


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("n")
def test_forward_backward_and_twice_backward(n: int):
    with launch({"parallel": {"tensor": {"size": n, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        for name, contract in _contracts(n).items():
            _check(name, contract, gpc)


def _refusals() -> list[str]:
    messages = []
    with launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        x = torch.zeros(3, 2)
        whole = {  # along which dimension, if none is given
            collectives.scatter: (3, 1),
            collectives.gather: (3, 4),
            collectives.all_gather: (6, 2),
            collectives.reduce_scatter: (2 - gpc.get_global_rank(), 2),
        }
        assert {call: tuple(call(x, MODE, context=gpc).shape) for call in whole} == whole
        for call in (
            lambda: collectives.scatter(x, MODE, 0, sizes=[1, 1], context=gpc),
            lambda: collectives.gather(x, MODE, 0, sizes=[1, 1], context=gpc),
            lambda: collectives.scatter(x, MODE, 0, sizes=[3], context=gpc),
            lambda: collectives.all_to_all(x, MODE, context=gpc),
            lambda: collectives.gather(x, MODE, 2, context=gpc),
        ):
            with pytest.raises(PlacementError) as caught:
                call()
            messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_said_before_anything_is_sent():
    messages = run_world(2, _refusals).values[0]
    for message, part in zip(
        messages,
        (
            "add up to 2",
            "its tensor has the shape (3, 2)",
            "Pass one length for each rank",
            "Pass send_sizes",
            "allowed are 0 to 1",
        ),
        strict=True,
    ):
        assert part in message


def test_without_a_group_everything_is_as_it_was():
    x = torch.randn(3, 2)
    for function in (
        collectives.copy,
        collectives.reduce,
        collectives.gather,
        collectives.scatter,
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.all_to_all,
        collectives.ring,
    ):
        assert function(x, MODE) is x
    assert collectives.split_sizes(7, MODE) == (7,)


def _recorded() -> list[tuple[str, int]]:
    with launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        x = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)  # 192 bytes
        with collectives.recorded() as calls:
            y = collectives.reduce(collectives.copy(x, MODE, context=gpc), MODE, context=gpc)
            collectives.all_gather(y, MODE, context=gpc).sum().backward()
        collectives.reduce(x, MODE, context=gpc)
        assert {call.mode for call in calls} == {MODE}
        return [(call.op, call.received) for call in calls]


def test_calls_are_recorded_with_the_bytes_that_arrive():
    expected = [("all_reduce", 192), ("all_gather", 192), ("reduce_scatter", 192), ("all_reduce", 192)]
    assert list(run_world(2, _recorded).values) == [expected] * 2


@contextmanager
def plan(rank: int, size: int = 4) -> Iterator[tuple[ParallelContext, Members]]:
    """A rank of a world that is not there: what is sent comes back."""
    context = ParallelContext()
    with fake_rank(load_config({"parallel": {"tensor": {"size": size, "mode": "1d"}}}), size, rank, context):
        members = wire.members_of(MODE, context)
        assert members is not None
        yield context, members


def test_every_call_is_recorded_with_the_bytes_that_arrive_in_a_larger_group():
    x, sizes = torch.zeros(5, 6, dtype=torch.float64), (2, 5, 0, 1)
    with plan(1) as (_, members), collectives.recorded() as outer, collectives.recorded() as calls:
        assert wire.all_reduce(x, members).shape == x.shape
        assert wire.begin_all_reduce(x, members)() is x
        assert wire.all_gather(x, members, 0, sizes).shape == (8, 6)
        assert wire.all_gather(torch.zeros(3, 5, 2), members, 1, sizes).shape == (3, 8, 2)
        assert wire.reduce_scatter(torch.zeros(8, 3), members, 0, sizes).shape == (5, 3)
        assert wire.reduce_scatter(torch.zeros(8, 8), members, 1, sizes).shape == (8, 5)
        assert wire.all_to_all(x, members, (1, 1, 2, 1), sizes).shape == (8, 6)
        assert wire.ring(x, members, 1, (7, 2)).shape == (7, 2)
        assert wire.broadcast(x, members, 1, (5, 6)) is x
        assert wire.broadcast(x, members, 2, (5, 3)).shape == (5, 3)
        assert wire.reduce_to(x, members, 3) is x
    assert [(call.op, call.received) for call in calls] == [
        ("all_reduce", 2 * 240 * 3 // 4),
        ("all_reduce", 2 * 240 * 3 // 4),
        ("all_gather", 3 * 6 * 8),
        ("all_gather", 3 * (3 * 2) * 4),
        ("reduce_scatter", 3 * 5 * 3 * 4),
        ("reduce_scatter", 3 * 5 * 8 * 4),
        ("all_to_all", 3 * 6 * 8),
        ("ring", 14 * 8),
        ("broadcast", 240 * 3 // 4),
        ("broadcast", 240 * 3 // 4),
        ("reduce", 240 * 3 // 4),
    ]
    assert outer == calls
    assert wire._recorders == []


def test_a_rank_with_an_empty_part_is_sent_those_of_the_others():
    with plan(2) as (_, members), collectives.recorded() as calls:
        assert wire.all_gather(torch.zeros(0, 6), members, 0, (2, 5, 0, 1)).shape == (8, 6)
    assert [call.received for call in calls] == [8 * 6 * 4]


def test_equal_parts_are_joined_without_a_copy():
    with plan(1) as (_, members):
        assert wire.all_gather(torch.zeros(2, 3), members, 0, (2,) * 4)._is_view()
        assert wire.all_gather(torch.zeros(1, 2, 3), members, 1, (2,) * 4)._is_view()
        assert not wire.all_gather(torch.zeros(2, 2, 3), members, 1, (2,) * 4)._is_view()


def test_a_group_of_one_is_none():
    with plan(0, 2) as (context, _):
        assert wire.members_of(ParallelMode.DATA, context) is None
        assert wire.members_of(ParallelMode.PARALLEL_2D_ROW, context) is None
        assert wire.members_of("1d", context) == wire.members_of(MODE, context)


def test_what_came_by_way_of_the_host_is_brought_to_its_place():
    swap = object.__new__(wire.Swap)
    there, swap._works, swap._landing = torch.zeros(2), [], torch.ones(2)
    swap._arriving = there
    assert swap.wait() is there
    assert there.tolist() == [1.0, 1.0]
    with plan(1) as (_, members):
        assert wire.backends_of(members.group)["cpu"] == "fake"
        swap = wire.Swap(torch.ones(2), there, 2, 0, members.group)
    assert swap._landing is there


def test_lengths_are_cut_in_multiples_of_a_unit_the_first_ones_longer():
    with plan(0) as (context, _):
        assert collectives.split_sizes(10, MODE, context=context) == (3, 3, 2, 2)
        assert collectives.split_sizes(18, MODE, 3, context=context) == (6, 6, 3, 3)
        with pytest.raises(PlacementError, match="10 cannot be split in multiples of 4"):
            collectives.split_sizes(10, MODE, 4, context=context)
