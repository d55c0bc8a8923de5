"""Pieces of a softmax, put together, are the softmax: outputs and gradients, however the keys are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from colonnade.nn.sequence import attention_kernels
from colonnade.nn.sequence.attention_kernels import Exact
from colonnade.nn.sequence.masks import Mask, Sight
from colonnade.nn.sequence.parts import Parts
from colonnade.nn.sequence.ring import Softmax, attention_over
from tests.nn.sequence.training import close, numbers


def _inputs(length: int, keys: int, groups: int = 1):
    return numbers(2, 3 * groups, length, 4, seed=1), numbers(2, 3, keys, 4, seed=2), numbers(2, 3, keys, 4, seed=3)


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_merged_halves_are_the_whole(cut):
    q, k, v = _inputs(5, 7)
    whole = Exact(0.5, Mask()).forward(q, k, v)
    softmax = Softmax(q)
    for rows in (slice(0, cut), slice(cut, 7)):
        if rows.stop > rows.start:
            softmax.add(slice(0, 5), *Exact(0.5, Mask()).forward(q, k[:, :, rows], v[:, :, rows]))
    for found, truth in zip(softmax.result(q.dtype), whole, strict=True):
        close(found, truth, 1e-14)


def test_rows_that_have_seen_no_key_yet_take_the_first_they_see():
    q, k, v = _inputs(5, 7)
    softmax, rest = Softmax(q), Exact(0.5, Mask()).forward(q, k, v)
    softmax.add(slice(2, 5), *(tensor[:, :, 2:] for tensor in rest))
    softmax.add(slice(0, 2), *(tensor[:, :, :2] for tensor in rest))
    for found, truth in zip(softmax.result(q.dtype), rest, strict=True):
        close(found, truth, 1e-14)


def _row(mask: Mask, row: int) -> torch.Tensor:
    start, stop = next((a, b) for a, b in pairwise(mask.documents or (0, 40)) if row < b)
    seen, keys = torch.zeros(1, 40), mask.seen(row - start, stop - start, stop - start)
    seen[0, start + keys.start : start + keys.stop] = 1
    return seen


@pytest.mark.parametrize("scores", [1 << 24, 1])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(3, 1), Mask(2, 0, (0, 7, 8, 40))])
def test_exact_attention_is_torch_attention_in_one_tile_or_many(mask, scores, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_SCORES", scores)
    inputs = [tensor.requires_grad_() for tensor in _inputs(40, 40, groups=2)]
    seen = torch.cat([_row(mask, row) for row in range(40)]).bool()
    truth = F.scaled_dot_product_attention(*inputs, attn_mask=seen, enable_gqa=True, scale=0.5)
    grad = numbers(2, 6, 40, 4, seed=9)
    expected = torch.autograd.grad(truth, inputs, grad)
    kernel = Exact(0.5, mask)
    with torch.no_grad():
        out, lse = kernel.forward(*inputs)
        found = kernel.backward(grad, *inputs, out, lse)
    close(out, truth, 1e-13)
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs, 1e-12)


@pytest.mark.parametrize("scores", [1 << 24, 1])
@pytest.mark.parametrize(
    ("length", "keys", "mask"),
    [
        (20, 40, Mask()),
        (20, 40, Mask(right=0)),
        (20, 40, Mask(left=9, right=4)),
        (20, 40, Mask(left=3)),
        (40, 20, Mask()),
        (40, 20, Mask(right=25)),
        (18, 17, Mask(left=2, right=1)),
    ],
)
def test_the_last_query_stands_where_the_last_key_does(length, keys, mask, scores, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_SCORES", scores)
    inputs = [tensor.requires_grad_() for tensor in _inputs(length, keys, groups=2)]
    seen = torch.zeros(length, keys, dtype=torch.bool)
    for row in range(length):
        found = mask.seen(row, length, keys)
        seen[row, found.start : found.stop] = True
    truth = F.scaled_dot_product_attention(*inputs, attn_mask=seen, enable_gqa=True, scale=0.5)
    grad = numbers(*truth.shape, seed=9)
    kernel = Exact(0.5, mask)
    with torch.no_grad():
        out, lse = kernel.forward(*inputs)
        found = kernel.backward(grad, *inputs, out, lse)
    for mine, theirs in zip((out, *found), (truth, *torch.autograd.grad(truth, inputs, grad)), strict=True):
        close(mine, theirs, 1e-12)


def test_low_precision_is_summed_in_float32():
    q, k, v = (tensor.to(torch.bfloat16) for tensor in _inputs(4, 6))
    out, lse = Exact(0.5, Mask()).forward(q, k, v)
    assert out.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize("scores", [1 << 24, 1])
def test_gradients_with_dropout_are_those_of_the_weights_that_were_kept(scores, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_SCORES", scores)
    inputs = [tensor.requires_grad_() for tensor in _inputs(20, 20)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return attention_over(*tensors, Parts((20,)), Sight(True, 4, (0, 6, 20)), 0.5, 0.4)

    grad = numbers(*inputs[0].shape, seed=9)
    found = torch.autograd.grad(attend(*inputs), inputs, grad)
    for at, tensor in enumerate(found):
        step = 1e-5 * numbers(*tensor.shape, seed=20 + at)
        ends = [attend(*(x + sign * step if i == at else x for i, x in enumerate(inputs))) for sign in (1, -1)]
        close((tensor * step).sum(), (grad * (ends[0] - ends[1])).sum() / 2, 1e-7)
    assert not torch.allclose(
        attend(*inputs), attention_over(*inputs, Parts((20,)), Sight(True, 4, (0, 6, 20)), 0.5, 0.0)
    )


def test_dropped_weights_keep_their_mean():
    q, k, v = (tensor.expand(200, -1, -1, -1, -1).flatten(0, 1) for tensor in _inputs(4, 6))
    plain, kept = (Exact(0.5, Mask(), dropout).forward(q, k, v)[0].mean(0) for dropout in (0.0, 0.3))
    assert (plain - kept).norm() <= 0.1 * plain.norm()


def test_a_tile_has_as_many_rows_as_scores_fit(monkeypatch):
    q, k = torch.empty(2, 3, 64, 4), torch.empty(2, 3, 64, 4)
    monkeypatch.setattr(attention_kernels, "_SCORES", 2 * 3 * 64 * 20)
    assert [rows.stop - rows.start for rows, *_ in attention_kernels._tiles(q, k, Mask())] == [20, 20, 20, 4]
    assert [rows.stop - rows.start for rows, *_ in attention_kernels._tiles(q[:0], k[:0], Mask())] == [64]
