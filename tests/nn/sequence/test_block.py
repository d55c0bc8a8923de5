"""Pieces of a softmax, put together, are the softmax: outputs and gradients, however the keys are cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from colonnade.nn.sequence import block
from tests.nn.sequence.training import close, numbers


def _inputs(length: int, keys: int, groups: int = 1):
    return (
        numbers(2, 3, groups, length, 4, seed=1),
        numbers(2, 3, 1, keys, 4, seed=2),
        numbers(2, 3, 1, keys, 4, seed=3),
    )


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_merged_halves_are_the_whole(cut):
    q, k, v = _inputs(5, 7)
    whole = block.attend(q, k, v, 0.5, False)
    halves = [
        block.attend(q, k[..., rows, :], v[..., rows, :], 0.5, False) if rows.stop > rows.start else _nothing(q)
        for rows in (slice(0, cut), slice(cut, 7))
    ]
    for found, truth in zip(block.merge(*halves[0], *halves[1]), whole, strict=True):
        close(found, truth, 1e-14)


def _nothing(q):
    return torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype)


@pytest.mark.parametrize("scores", [1 << 24, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_torch_attention_in_one_tile_or_many(causal, scores, monkeypatch):
    monkeypatch.setattr(block, "_SCORES", scores)
    inputs = [tensor.requires_grad_() for tensor in _inputs(40, 40, groups=2)]
    truth = F.scaled_dot_product_attention(*(t.expand(2, 3, 2, 40, 4) for t in inputs), is_causal=causal, scale=0.5)
    grad = numbers(2, 3, 2, 40, 4, seed=9)
    expected = torch.autograd.grad(truth, inputs, grad)
    with torch.no_grad():
        out, lse = block.attend(*inputs, 0.5, causal)
        found = block.attend_backward(grad, (grad * out).sum(-1), *inputs, lse, 0.5, causal)
    close(out, truth, 1e-13)
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs, 1e-12)


def test_low_precision_is_summed_in_float32():
    q, k, v = (tensor.to(torch.bfloat16) for tensor in _inputs(4, 6))
    out, lse = block.attend(q, k, v, 0.5, False)
    assert out.dtype == lse.dtype == torch.float32
