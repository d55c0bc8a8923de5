"""Dispatch in one process: the order in which assignments are sent, and sums of what comes back, against loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.nn.moe import dispatch as dispatching
from colonnade.nn.moe.dispatch import combine, counted, dispatch, order
from colonnade.nn.moe.router import Routing

EXPERTS = 3


def routing(experts: list[list[int]], limits: list[int] | None, device: str) -> Routing:
    chosen = torch.tensor(experts, device=device)
    kept = None if limits is None else torch.tensor(limits, device=device)
    counts, none = counted(chosen, EXPERTS), torch.empty(0)
    return Routing(chosen, torch.ones(chosen.shape), counts, counts.sum(0), kept, none, none)


def by_hand(experts: list[list[int]], limits: list[int] | None) -> list[tuple[int, int]]:
    """(choice, token) of every row that is sent: by expert, then choice, then token, as many as its limit."""
    sent = []
    for expert in range(EXPERTS):
        mine = [(c, t) for c, row in enumerate(experts) for t, chosen in enumerate(row) if chosen == expert]
        sent += mine[: len(mine) if limits is None else limits[expert]]
    return sent


by_limits = pytest.mark.parametrize("limits", [None, [2, 1, 0], [5, 5, 5], [0, 0, 0]], ids=str)


def check_rows(limits: list[int] | None, device: str, dtype: torch.dtype, width: int) -> None:
    """What is sent and what comes back, and their gradients, are those of loops over assignments."""
    experts = [[0, 2, 1, 0, 0], [1, 1, 0, 2, 1]]
    sent = by_hand(experts, limits)
    made = routing(
        experts, None if limits is None else [min(a, b) for a, b in zip(limits, [4, 4, 2], strict=True)], device
    )
    count = len(sent)
    assert int(made.kept.sum()) == count
    for cut in (False, True):
        sends = order(made.experts, made.chosen, made.limits)
        sends = sends.cut(count) if cut else sends
        assert sends.rows[:count].tolist() == [choice * 5 + token for choice, token in sent]
        x = torch.randn(5, width, dtype=dtype, device=device, requires_grad=True)
        rows = dispatch(x, sends)
        assert len(rows) == (count if cut or limits is None else 11)
        assert torch.equal(rows[:count], x[[token for _, token in sent]])
        rows = torch.cat([rows[:count], torch.full_like(rows[count:], torch.nan)])  # what experts leave there
        weights = torch.rand(5, 2, dtype=dtype, device=device, requires_grad=True)
        back = combine(rows * 2, weights, sends)
        kept = torch.zeros(5, 2, dtype=dtype, device=device)
        for choice, token in sent:
            kept[token, choice] = 1
        expected = 2 * x * (weights * kept).sum(1, keepdim=True)
        near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}
        torch.testing.assert_close(back, expected, **near)
        grads = (torch.autograd.grad(y.cos().sum(), (x, weights)) for y in (back, expected))
        for found, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(found, wanted, **near)


@by_limits
def test_rows_are_sent_by_expert_and_choice_and_come_back_to_their_tokens(limits):
    check_rows(limits, "cpu", torch.float64, 2)


class Fused:
    """What the kernels of a GPU promise, by plain operators."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sums(self, rows: Tensor, places: Tensor, weights: Tensor | None, spare: int | None) -> Tensor:
        self.calls.append("sums")
        factors = torch.ones(places.shape, dtype=rows.dtype) if weights is None else weights
        return torch.stack(
            [
                sum(
                    (rows[at] * factor for at, factor in zip(*pair, strict=True) if at != spare),
                    rows.new_zeros(rows.size(1)),
                )
                for pair in zip(places.tolist(), factors, strict=True)
            ]
        )

    def row_gradients(self, gradient: Tensor, rows: Tensor, tokens: Tensor, of_row: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("row_gradients")
        return gradient[tokens] * of_row.unsqueeze(1), (rows * gradient[tokens]).sum(-1)


@by_limits
def test_kernels_sum_rows_where_there_are_any_and_no_second_derivative_is_wanted(limits, monkeypatch):
    fused = Fused()
    monkeypatch.setattr(dispatching, "_kernels", lambda rows: fused)
    check_rows(limits, "cpu", torch.float64, 2)
    assert fused.calls == ["sums", "row_gradients", "sums"] * 2
    rows = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    sends = order(torch.tensor([[0, 2, 1]]), torch.tensor([1, 1, 1]))
    fused.calls.clear()
    out = combine(rows, torch.ones(3, 1, dtype=torch.float64), sends)
    torch.autograd.grad(out.sum(), rows, create_graph=True)
    assert fused.calls == ["sums"]


@pytest.mark.parametrize(
    ("compiling", "is_cuda", "dtype", "found"),
    [
        (False, True, torch.float32, True),
        (False, True, torch.bfloat16, True),
        (True, True, torch.float32, False),
        (False, False, torch.float32, False),
        (False, True, torch.float64, False),
        (False, False, torch.float64, False),
    ],
)
def test_which_rows_have_kernels(compiling, is_cuda, dtype, found, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(dispatching, "_triton_kernels", lambda: "kernels")
    assert dispatching._kernels(SimpleNamespace(is_cuda=is_cuda, dtype=dtype)) == ("kernels" if found else None)


@pytest.mark.parametrize("found", [True, False])
def test_without_triton_there_are_no_kernels(found, monkeypatch):
    monkeypatch.setattr(dispatching, "find_spec", lambda name: object() if found else None)
    monkeypatch.setattr(dispatching, "import_module", lambda name: name)
    expected = "colonnade.nn.nn_kernels" if found else None
    assert dispatching._triton_kernels.__wrapped__() == expected


class Sorts(TorchDispatchMode):
    """How the sorts that run are asked for."""

    stable: ClassVar[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("sort", "argsort"):
            self.stable.append((kwargs or {}).get("stable", False))
        return func(*args, **(kwargs or {}))


def test_assignments_of_one_expert_keep_their_order_however_many_experts_there_are():
    for experts in (3, 2**15, 40000):
        choices = torch.tensor([[experts - 1, 0, experts - 1], [1, experts - 2, 0]])
        with Sorts() as sorts:
            sends = order(choices, torch.bincount(choices.flatten(), minlength=experts))
        assert sends.rows.tolist() == [1, 5, 3, 4, 0, 2]
        assert sorts.stable[-1] is True  # what a CPU does anyway, and a GPU does not
