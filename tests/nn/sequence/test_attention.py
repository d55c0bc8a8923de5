"""Ring and Ulysses attention equal torch's own attention in one process, with gradients, for any split."""

from __future__ import annotations

import unittest.mock
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError
from colonnade.nn.sequence import (
    Parts,
    SharedLengths,
    gather_sequence,
    ring,
    ring_attention,
    split_sequence,
    ulysses,
    ulysses_attention,
)
from colonnade.nn.sequence.attention_kernels import Exact
from colonnade.nn.sequence.parts import sequence_rank
from colonnade.parallel import wire
from colonnade.parallel.wire import recorded
from colonnade.testing import run_world
from tests.nn.sequence.training import close, numbers, seen_keys
from tests.ranks import on_ranks

RTOL = 1e-12
ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}


def _inputs(length: int, kv_heads: int) -> list[Tensor]:
    heads = (4, kv_heads, kv_heads)
    return [numbers(2, each, length, 3, seed=at).requires_grad_() for at, each in enumerate(heads)]


def _case(kind: str, causal: bool, split: tuple[int, ...], gpc: ParallelContext, kv_heads: int = 4, **more: Any):
    parts = Parts(split, more.get("balanced", False))
    mine = parts.positions(sequence_rank(gpc)[1])
    whole = _inputs(sum(split), kv_heads)
    weight = numbers(2, 4, sum(split), 3, seed=7)
    seen = seen_keys(sum(split), causal, more.get("window"), more.get("documents"))
    if more.get("sinks") is not None:
        _with_sinks(kind, causal, mine, whole, weight, seen, gpc, **more)
        return
    truth = F.scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=kv_heads != 4)
    grads = torch.autograd.grad(truth, whole, weight)
    local = [tensor.detach()[:, :, mine].clone().requires_grad_() for tensor in whole]
    out = ATTENTION[kind](*local, causal=causal, context=gpc, **more)
    close(out, truth[:, :, mine], RTOL)
    for found, expected in zip(torch.autograd.grad(out, local, weight[:, :, mine]), grads, strict=True):
        close(found, expected[:, :, mine], RTOL)
    close(gather_sequence(out, 2, lengths=split, balanced=parts.balanced, context=gpc), truth, RTOL)


def _with_sinks(
    kind: str,
    causal: bool,
    mine: Tensor,
    whole: list[Tensor],
    weight: Tensor,
    seen: Tensor,
    gpc: ParallelContext,
    sinks: Tensor,
    **more: Any,
) -> None:
    """A sink is one more key, of a score that the head brings along and of no value."""
    (q, k, v), sinks = whole, sinks.clone().requires_grad_()
    scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~seen, float("-inf"))
    scores = torch.cat([scores, sinks[:, None, None].expand(2, -1, q.size(2), 1)], -1)
    truth = scores.softmax(-1)[..., :-1] @ v
    *grads, towards = torch.autograd.grad(truth, [q, k, v, sinks], weight)
    local = [tensor.detach()[:, :, mine].clone().requires_grad_() for tensor in whole]
    out = ATTENTION[kind](*local, causal=causal, context=gpc, sinks=sinks, **more)
    close(out, truth[:, :, mine], RTOL)
    *found, of_sinks = torch.autograd.grad(out, [*local, sinks], weight[:, :, mine])
    for one, expected in zip(found, grads, strict=True):
        close(one, expected[:, :, mine], RTOL)
    if gpc.is_initialized(ParallelMode.SEQUENCE):
        torch.distributed.all_reduce(of_sinks, group=gpc.get_group(ParallelMode.SEQUENCE))
    close(of_sinks, towards, RTOL)


def _dropped(kind: str, gpc: ParallelContext) -> None:
    """The output is linear in the values: <weight, out> = <dv, v> over all ranks, if the same weights are dropped."""
    at = gpc.get_local_rank(ParallelMode.SEQUENCE)
    q, k, v, weight = (numbers(2, 4, 6, 3, seed=10 * at + seed).requires_grad_() for seed in range(4))
    options: dict[str, Any] = {"causal": True, "window": 9, "context": gpc}
    out, plain = (ATTENTION[kind](q, k, v, dropout=dropout, **options) for dropout in (0.4, 0.0))
    assert not torch.allclose(out, plain)
    (dv,) = torch.autograd.grad(out, v, weight)
    sides = torch.stack([(weight * out).sum(), (dv * v).sum()]).detach()
    torch.distributed.all_reduce(sides, group=gpc.get_group(ParallelMode.SEQUENCE))
    close(sides[0], sides[1], 1e-12)


def _documents(total: int) -> list[int]:
    """One that ends inside a part, a short one, and one over the rest."""
    return [0, total // 3, total // 3 + 1, total]


def _all_cases(kind: str, size: int) -> None:
    with launch({"parallel": {"sequence": size}}, context=ParallelContext(), verbose=False) as gpc:
        _dropped(kind, gpc)
        uneven = (5, 1, 0, 3)[:size] if kind == "ring" else (5, 1, 2, 3)[:size]
        for causal in (False, True):
            for lengths in ((4,) * size, uneven):
                _case(kind, causal, lengths, gpc)
                _case(kind, causal, lengths, gpc, lengths=lengths)
                for masked in ({"window": 2}, {"window": 5, "documents": _documents(sum(lengths))}):
                    _case(kind, causal, lengths, gpc, **masked)
            _case(kind, causal, (4,) * size, gpc, documents=_documents(4 * size))
            _case(kind, causal, (4,) * size, gpc, window=3, sinks=numbers(4, seed=5))
            if kind == "ring":
                _case(kind, causal, (4,) * size, gpc, kv_heads=2, window=1)
                balanced = Parts.of(4 * size + 1, size, True).lengths
                _case(kind, causal, balanced, gpc, balanced=True, window=3)
                _case(kind, causal, balanced, gpc, balanced=True, documents=_documents(4 * size + 1), kv_heads=2)
                _case(kind, causal, (4,) * size, gpc, kv_heads=2)
                for total in (4 * size, 4 * size + 3):
                    _case(kind, causal, Parts.of(total, size, True).lengths, gpc, balanced=True)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("size")
def test_outputs_and_gradients_equal_one_process(size: int):
    for kind in ATTENTION:
        _all_cases(kind, size)


def test_in_one_process_they_are_plain_attention(monkeypatch):
    monkeypatch.setattr(ulysses, "all_to_all", None)  # nobody is there to send to
    q, k, v = _inputs(6, 2)
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for attention in ATTENTION.values():
        close(attention(q, k, v, causal=True), truth, RTOL)
    everything = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for attention in ATTENTION.values():  # as torch's: not causal unless asked, scaled by the width unless told
        close(attention(q, k, v), everything, RTOL)
        scaled = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3)
        close(attention(q, k, v, scale=0.3), scaled, RTOL)
    for size in (2, 4):  # as many sequences, or tokens, as heads: of keys, or of queries
        q, k, v = (numbers(size, heads, size, 3, seed=heads) for heads in (4, 2, 2))
        for attention in ATTENTION.values():
            close(attention(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True), RTOL)


@pytest.mark.parametrize("kind", ATTENTION)
def test_in_one_process_too_there_are_windows_documents_and_sinks(kind):
    gpc = ParallelContext()
    for causal in (False, True):
        for masked in ({"window": 2}, {"documents": [0, 2, 3, 7]}, {"window": 1, "documents": [0, 3, 7]}):
            _case(kind, causal, (7,), gpc, kv_heads=2, **masked)
            _case(kind, causal, (7,), gpc, sinks=numbers(4, seed=5), **masked)
        _case(kind, causal, (7,), gpc, sinks=numbers(4, seed=5))


class Watched(Exact):
    """Takes gradients whose last dimension lies element by element, as kernels of a GPU do, and notes where they lie."""

    seen: ClassVar[list[int]] = []

    def backward(self, grad: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert grad.stride(-1) == 1
        self.seen.append(grad.data_ptr())
        return super().backward(grad, *rest)


def test_gradients_are_copied_only_where_kernels_would_refuse_them(monkeypatch):
    monkeypatch.setattr(ring, "kernel_for", lambda q, k, v, *rest: Watched(*rest))
    q, k, v = _inputs(6, 4)
    out = ring_attention(q, k, v, window=2)
    out.sum().backward(retain_graph=True)  # one number for all elements
    given = numbers(2, 6, 4, 3, seed=8).transpose(1, 2)
    out.backward(given)
    assert Watched.seen[-1] == given.data_ptr()


@pytest.mark.parametrize("dropout", [1.0, 1.5, -0.1])
@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention])
def test_a_share_that_is_dropped_is_below_one(attention, dropout):
    with pytest.raises(LayoutError, match=f"dropout={dropout} of attention weights"):
        attention(*_inputs(6, 4), dropout=dropout)
    attention(*_inputs(6, 4), dropout=0.9)


def _low_precision(kind: str, total: int = 512, low: torch.dtype = torch.bfloat16) -> None:
    """As near to the truth as one process in the same precision, where the kernels of a GPU are used if there is one."""
    with launch({"parallel": {"sequence": 4}}, context=ParallelContext(), verbose=False) as gpc:
        options = {"balanced": True} if kind == "ring" else {}
        mine = Parts.of(total, 4, kind == "ring").positions(gpc.get_local_rank(ParallelMode.SEQUENCE))
        exact = [numbers(1, heads, total, 64, seed=at).to(low).double() for at, heads in enumerate((8, 4, 4, 8))]
        for causal, masked in (
            (True, {}),
            (False, {}),
            (True, {"window": total // 5}),
            (True, {"documents": [0, total // 7, total // 2, total]}),
        ):
            seen = seen_keys(total, causal, masked.get("window"), masked.get("documents")).to(exact[0].device)
            answers = []
            for dtype in (torch.float64, low):
                *inputs, grad = (tensor.to(dtype).requires_grad_() for tensor in exact)
                out = F.scaled_dot_product_attention(*inputs, attn_mask=seen, enable_gqa=True)
                answers.append([t[:, :, mine].double() for t in (out, *torch.autograd.grad(out, inputs, grad))])
            *inputs, grad = (tensor[:, :, mine].to(low).requires_grad_() for tensor in exact)
            out = ATTENTION[kind](*inputs, causal=causal, context=gpc, **options, **masked)
            found = [out, *torch.autograd.grad(out, inputs, grad)]
            for truth, one, ours in zip(*answers, found, strict=True):
                assert ours.dtype == low
                apart, theirs = ((x.double() - truth).norm() / truth.norm() for x in (ours, one))
                assert apart <= 1.5 * theirs + (2e-3 if low == torch.bfloat16 else 1e-5), (
                    causal,
                    masked,
                    apart.item(),
                    theirs.item(),
                )


@pytest.mark.slow
@on_ranks(4)
def test_bfloat16_is_as_near_as_in_one_process():
    for kind in ATTENTION:
        _low_precision(kind, 64)


def _refusals() -> list[str]:
    said = []
    with launch({"parallel": {"sequence": 2}}, context=ParallelContext(), verbose=False) as gpc:
        three = torch.zeros(2, 3, 4, 2)
        assert split_sequence(three, 2, context=gpc).shape == (2, 3, 2, 2)
        for call in (
            lambda: ulysses_attention(three, three, three, context=gpc),
            lambda: ring_attention(three, three, three, lengths=[3, 4, 4], context=gpc),
        ):
            with pytest.raises(LayoutError) as error:
                call()
            said.append(str(error.value))
    return said


def test_what_cannot_be_meant_is_refused_on_every_rank_before_anything_is_sent():
    heads, lengths = run_world(2, _refusals).values[0]
    assert "3 heads, which cannot be divided evenly over 2 ranks" in heads
    assert "lengths=[3, 4, 4]" in lengths


@on_ranks(2)
def test_lengths_are_asked_for_once_in_a_pass():
    """How often the ranks asked for lengths, after each of these calls."""
    told = []
    with launch({"parallel": {"sequence": 2}}, context=ParallelContext(), verbose=False) as gpc:
        at = gpc.get_local_rank(ParallelMode.SEQUENCE)
        shared = SharedLengths()
        first, second, third, _, fifth = (shared.join() for _ in range(5))

        def ask(layer: int, lengths: tuple[int, int]) -> None:
            with unittest.mock.patch.object(wire, "numbers_of_all", wraps=wire.numbers_of_all) as asked:
                assert shared.of(layer, lengths[at], gpc) == lengths
            told.append(asked.call_count)

        ask(first, (5, 4))
        ask(second, (5, 4))
        ask(third, (5, 4))
        ask(first, (5, 5))  # the length of rank 0 is as before: it must ask all the same
        ask(second, (5, 5))
        ask(fifth, (2, 5))  # of another stage, which has another micro-batch
        x = torch.ones((), requires_grad=True) * 1
        x.register_hook(
            lambda grad: ask(second, (3, 2))
        )  # a layer that is computed again in backward, and the one before
        y = x * 1
        y.register_hook(lambda grad: ask(first, (3, 2)))
        y.backward()
        ask(first, (5, 4))
    assert told == [1, 0, 0, 1, 0, 1, 1, 0, 1]


def _memory() -> tuple[int, int]:
    """(elements saved for backward, the longest tensor among them)"""
    with launch({"parallel": {"sequence": 2}}, context=ParallelContext(), verbose=False) as gpc:
        q, k, v = (torch.randn(1, 1, 64, 4, requires_grad=True) for _ in range(3))
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), recorded() as calls:
            ring_attention(q, k, v, causal=True, lengths=[64, 64], context=gpc)
        assert calls == []
        return sum(tensor.numel() for tensor in saved), max(tensor.numel() for tensor in saved)


def test_what_is_kept_for_backward_grows_with_the_part_and_not_with_the_sequence():
    kept, largest = run_world(2, _memory).values[0]
    assert largest == 64 * 4
    assert kept == 4 * 64 * 4 + 64  # q, k, v, the output, and one number for each query


@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention])
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((2, 3, 5, 6), (2, 3, 5, 6)),
        ((2, 4, 5, 6), (2, 2, 5, 6)),
        ((2, 4, 7, 6), (2, 4, 7, 6)),
        ((1, 4, 5, 6), (1, 4, 5, 6)),
        ((4, 5, 6), (4, 5, 6)),
        ((2, 4, 5, 6, 1), (2, 4, 5, 6, 1)),
    ],
)
def test_shapes_that_cannot_be_meant_are_refused(attention, k, v):
    with pytest.raises(LayoutError, match=r"q \(2, 4, 5, 6\), k "):
        attention(torch.zeros(2, 4, 5, 6), torch.zeros(k), torch.zeros(v))
