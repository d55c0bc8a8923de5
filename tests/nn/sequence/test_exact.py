"""Pieces of a softmax, put together, are the softmax: outputs and gradients, however the keys are cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from colonnade.nn.sequence import exact
from colonnade.nn.sequence.exact import Exact
from colonnade.nn.sequence.masks import Mask
from colonnade.nn.sequence.ring import Softmax
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


@pytest.mark.parametrize("scores", [1 << 24, 1])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(3, 1), Mask(2, 0, (0, 7, 8, 40))])
def test_exact_attention_is_torch_attention_in_one_tile_or_many(mask, scores, monkeypatch):
    monkeypatch.setattr(exact, "_SCORES", scores)
    inputs = [tensor.requires_grad_() for tensor in _inputs(40, 40, groups=2)]
    behind = torch.arange(40) - torch.arange(40).unsqueeze(-1)
    seen = behind <= (40 if mask.right is None else mask.right)
    seen &= -behind <= (40 if mask.left is None else mask.left)
    if mask.documents is not None:
        document = torch.bucketize(torch.arange(40), torch.tensor(mask.documents), right=True)
        seen &= document == document.unsqueeze(-1)
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


def test_low_precision_is_summed_in_float32():
    q, k, v = (tensor.to(torch.bfloat16) for tensor in _inputs(4, 6))
    out, lse = Exact(0.5, Mask()).forward(q, k, v)
    assert out.dtype == lse.dtype == torch.float32
