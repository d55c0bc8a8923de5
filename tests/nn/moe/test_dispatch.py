"""Dispatch in one process: the order in which assignments are sent, and sums of what comes back, against loops."""

from __future__ import annotations

import pytest
import torch

from colonnade.nn.moe.dispatch import Traffic, combine, dispatch, order
from colonnade.nn.moe.router import Routing
from colonnade.nn.moe.scope import counted

EXPERTS = 3


def routing(experts: list[list[int]], limits: list[int] | None) -> Routing:
    chosen = torch.tensor(experts)
    kept = None if limits is None else torch.tensor(limits)
    return Routing(chosen, torch.ones(chosen.shape), counted(chosen, EXPERTS), kept, None)


def by_hand(experts: list[list[int]], limits: list[int] | None) -> list[tuple[int, int]]:
    """(choice, token) of every row that is sent: by expert, then choice, then token, as many as its limit."""
    sent = []
    for expert in range(EXPERTS):
        mine = [(c, t) for c, row in enumerate(experts) for t, chosen in enumerate(row) if chosen == expert]
        sent += mine[: len(mine) if limits is None else limits[expert]]
    return sent


@pytest.mark.parametrize("limits", [None, [2, 1, 0], [5, 5, 5], [0, 0, 0]], ids=str)
def test_rows_are_sent_by_expert_and_choice_and_come_back_to_their_tokens(limits):
    experts = [[0, 2, 1, 0, 0], [1, 1, 0, 2, 1]]
    sent = by_hand(experts, limits)
    made = order(
        routing(experts, None if limits is None else [min(a, b) for a, b in zip(limits, [4, 4, 2], strict=True)])
    )
    count = len(sent)
    assert int(made.counts.sum()) == count
    assert made.rows[:count].tolist() == [choice * 5 + token for choice, token in sent]
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    rows = dispatch(x, made, count)
    assert torch.equal(rows, torch.stack([x[token] for _, token in sent]) if sent else x.new_empty(0, 2))
    back = combine(rows * 2, made, count)
    times = torch.tensor([sum(token == t for _, t in sent) for token in range(5)], dtype=torch.float64)
    torch.testing.assert_close(back, 2 * x * times[:, None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    torch.testing.assert_close(grad, 2 * times[:, None].expand(5, 2))


def test_rows_that_arrive_by_rank_are_turned_by_expert_and_back():
    traffic = Traffic([3, 4], [[1, 2], [0, 3]])
    assert traffic.arrivals == [3, 3]
    assert traffic.per_expert == [1, 5]
    x = torch.tensor([[10], [11], [12], [20], [21], [22]])  # of rank 0: one for expert 0, two for expert 1; ...
    turned = traffic.by_expert(x)
    assert turned.flatten().tolist() == [10, 11, 12, 20, 21, 22]
    traffic = Traffic([0, 0], [[2, 1], [1, 2]])
    turned = traffic.by_expert(x)
    assert turned.flatten().tolist() == [10, 11, 20, 12, 21, 22]
    assert torch.equal(traffic.by_rank(turned), x)
    assert Traffic([6], [[2, 4]]).by_expert(x) is x
    assert Traffic([2, 4], [[2], [4]]).by_rank(x) is x
